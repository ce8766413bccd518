"""LocalAI's model YAML to a ModelDeployment, and with a host file to the ShardGroup it runs on. Pure.

Of one model, of several documents, or a list of models (--models-config-file). Names are of LocalAI's
docs/content/features/mlx-distributed.md and docs/content/advanced/model-configuration.md (2026-09).
"""

from collections.abc import Callable
from dataclasses import dataclass

from fleetctl.convert.foreign_config import ForeignConfig, OmissionReason, read_documents
from fleetctl.convert.hostfile_groups import GroupImport, GroupOptions, build_group
from fleetctl.convert.hostfile_reader import read_hostfile
from fleetctl.convert.manifest_drafts import (
    ManifestDraft,
    join_manifests,
    object_name,
    served_names,
)
from manifests.trees import Tree
from schemas.shardgroup import Backend

_BACKENDS = {"mlx": "alone", "mlx-distributed": "together"}
_OPTIONS = {
    "trust_remote_code": "code of a model is never run",
    "max_tokens": "clients say max_tokens themselves",
    "temperature": "clients say it themselves",
    "temp": "clients say it themselves",
    "top_p": "clients say it themselves",
}
_REASONS = {
    "parameters": OmissionReason(says="clients say it with each request"),
    "backend": OmissionReason(says="the fleet's engines are MLX"),
    "template": OmissionReason(says="the chat template of the model's own folder is used"),
    "stopwords": OmissionReason(says="clients say stop; the model's own end of turn is known"),
    "options": OmissionReason(says="not one of the backend's options for MLX"),
    "threads": OmissionReason(says="MLX runs on the GPU"),
    "f16": OmissionReason(says="numbers are as the model's folder has them"),
    "gpu_layers": OmissionReason(says="all layers run on the GPU"),
    "mmap": OmissionReason(says="engines read safetensors as MLX does"),
    "mmlock": OmissionReason(says="engines hold their memory wired"),
    "function": OmissionReason(says="tool calls are understood by the model's own template"),
    "description": OmissionReason(says="write it as an annotation if people should see it"),
    "usage": OmissionReason(says="write it as an annotation if people should see it"),
    "download_files": OmissionReason(says="put the model below each agent's --models-dir"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAiContext:
    """What stands around the file."""

    host_file: Callable[[str], tuple[str, str]]
    """Returns the text and the name of a host file, by the path that the YAML says; raises ManifestErrors."""
    nodes: tuple[str, ...] = ()
    """The Macs in rank order, where the host file has only addresses."""


def convert(text: str, source: str, around: LocalAiContext) -> str:
    """Return the manifests.

    Raises:
        ManifestErrors: everything that is wrong with the file or its host file, with its lines.

    """
    header = [f"From {source} of LocalAI. What has no counterpart:"]
    texts: list[str] = []
    drafts: list[ManifestDraft] = []
    for document in read_documents(text, source):
        whole, content = ForeignConfig(document), document.root.content
        places: list[tuple[str | int, ...]] = (
            [(index,) for index in range(len(content))] if isinstance(content, list) else [()]
        )
        for place in places:
            model = whole.below(*place)
            if model is None:
                whole.refuse(place, "expected a model: name, backend, parameters")
                continue
            draft, group = _model(model, around)
            header.extend(model.left(_REASONS, "LocalAI's own; the fleet has no word for it"))
            model.checked()
            drafts.append(draft)
            texts.extend([group] if group else [])
        whole.checked()
        if not drafts:
            whole.refuse((), "names no models")
            whole.checked()
    groups = "".join(f"{group}---\n" for group in dict.fromkeys(texts))
    return join_manifests(header, []) + groups + join_manifests([], drafts)


def _model(model: ForeignConfig, around: LocalAiContext) -> tuple[ManifestDraft, str]:
    """Return the deployment, and the text of its group if it has one."""
    name = model.text("name")
    path = model.text("parameters", "model") or model.text("model")
    if path is None:
        model.refuse(("parameters",), "names no model", "Write: parameters: {model: ORG/MODEL}")
    path = (path or "model").removeprefix("huggingface://").removeprefix("https://huggingface.co/")
    draft = ManifestDraft(
        kind="ModelDeployment", name=object_name(name or path, "model"), source=model
    )
    draft.put("spec.model.path", path, "parameters", "model")
    draft.put("spec.model.adapter", model.text("lora_adapter"), "lora_adapter")
    draft.put("spec.model.draft.path", model.text("draft_model"), "draft_model")
    if model.where("draft_model"):
        draft.put("spec.model.draft.tokens", model.whole("n_draft", least=1), "n_draft")
    names: list[Tree] = [*served_names(draft.name, name)]
    draft.put("spec.servedNames", names or None, "name")
    draft.put("spec.contextLength", model.whole("context_size", least=1), "context_size")
    kind = _kind(model)
    options = _options(model)
    host_file = options.get("hostfile")
    if host_file is None or kind == "alone":
        return draft, ""
    backend: Backend = "jaccl" if options.get("distributed_backend") == "jaccl" else "ring"
    found = _group(draft.name, backend, around, host_file)
    draft.put("spec.sharding", found.group.name)
    return draft, _group_text(found, backend)


def _kind(model: ForeignConfig) -> str:
    """Return whether the backend runs on one Mac or on several; others have other models."""
    word = model.text("backend")
    if word is not None and word not in _BACKENDS:
        model.refuse(
            ("backend",),
            f"is {word[:40]}, whose models are not in MLX's format",
            "Only mlx and mlx-distributed can be imported; look for the model below mlx-community",
        )
    return _BACKENDS.get(word or "mlx", "alone")


def _options(model: ForeignConfig) -> dict[str, str]:
    """Return the options for groups; of the others `left` tells, by what stands in the list."""
    found: dict[str, str] = {}
    for index in range(model.count("options")):
        said = model.text("options", index) or ""
        name, _, value = said.partition(":")
        if name in ("hostfile", "distributed_backend"):
            found[name] = value
        else:
            why = _OPTIONS.get(name, "not one of the backend's options for MLX")
            model.tell(("options", index), why)
    known = {"ring": "ring", "jaccl": "jaccl"}
    if found.get("distributed_backend", "ring") not in known:
        model.refuse(("options",), "distributed_backend is ring or jaccl")
    return found


def _group(name: str, backend: Backend, around: LocalAiContext, host_file: str) -> GroupImport:
    text, source = around.host_file(host_file)
    wanted = GroupOptions(name=f"{name}-group", nodes=around.nodes, backend=backend)
    return build_group(read_hostfile(text, source), wanted)


def _group_text(found: GroupImport, backend: Backend) -> str:
    """Return the group, split as LocalAI splits: layers over a ring, within layers over RDMA."""
    parallelism = "Tensor" if backend == "jaccl" else "Pipeline"
    spec = found.group.spec.model_copy(update={"parallelism": parallelism})
    notes = tuple(note for note in found.notes if not note.startswith("LocalAI runs its ring"))
    group = found.group.model_copy(update={"spec": spec})
    return GroupImport(group=group, notes=notes).manifest()
