"""Conversion of LocalAI's model YAML to ModelDeployments, and of its host files to ShardGroups. Pure.

Accepts one model, several documents, or a list of models (--models-config-file). Field names come from LocalAI's
docs/content/features/mlx-distributed.md and docs/content/advanced/model-configuration.md (2026-09).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from fleetctl.convert.foreign_config import ForeignConfig, OmissionReason, read_documents
from fleetctl.convert.hostfile_groups import GroupOptions, build_group, one_mac_pool
from fleetctl.convert.hostfile_reader import read_hostfile
from fleetctl.convert.manifest_drafts import (
    ManifestDraft,
    join_manifests,
    object_name,
    served_names,
)
from fleetctl.convert.node_names import NodeNames
from manifests.trees import Tree
from schemas.shardgroup import Backend

_BACKENDS = {"mlx": "alone", "mlx-distributed": "together"}
_OPTIONS = {
    "trust_remote_code": "the fleet never runs code of a model",
}
# Options of the backend, and parameters of the model, that requests may leave out: names, and those of spec.sampling.
_SAMPLING = {
    "max_tokens": "maxTokens",
    "temperature": "temperature",
    "temp": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "min_p": "minP",
    "repeat_penalty": "repetitionPenalty",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
}
_INTEGERS = ("maxTokens", "topK")
_IN_OPTIONS = ("max_tokens", "temperature", "temp", "top_p")
_REASONS = {
    "parameters": OmissionReason(text="clients set it in each request"),
    "backend": OmissionReason(text="all engines of the fleet use MLX"),
    "template": OmissionReason(text="the engine uses the chat template of the model folder"),
    "stopwords": OmissionReason(
        text="clients set stop; the model folder defines the end of a turn"
    ),
    "options": OmissionReason(text="not one of the backend's options for MLX"),
    "threads": OmissionReason(text="MLX runs on the GPU"),
    "f16": OmissionReason(text="the model folder defines the number format"),
    "gpu_layers": OmissionReason(text="all layers run on the GPU"),
    "mmap": OmissionReason(text="engines read safetensors as MLX does"),
    "mmlock": OmissionReason(text="engines keep their memory wired"),
    "function": OmissionReason(text="the model's own template defines tool calls"),
    "description": OmissionReason(text="add it as an annotation if it should be visible"),
    "usage": OmissionReason(text="add it as an annotation if it should be visible"),
    "download_files": OmissionReason(text="put the model below each agent's --models-dir"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAiContext:
    """Context of the conversion: access to host files, and the nodes of the Macs."""

    host_file: Callable[[str], tuple[str, str]]
    """Returns text and name of the host file at the path in the YAML; raises ManifestErrors."""
    nodes: NodeNames = field(default_factory=NodeNames)
    """Nodes in rank order, for host files that contain only addresses."""
    default_host_file: str = ""
    """Host file of distributed models whose options name none (MLX_DISTRIBUTED_HOSTFILE); empty: one Mac."""
    default_backend: str = ""
    """Backend of distributed models whose options name none (MLX_DISTRIBUTED_BACKEND); empty: ring."""


def convert(text: str, source: str, context: LocalAiContext) -> str:
    """Convert the file to manifests.

    Raises:
        ManifestErrors: all problems of the file or its host file, with their lines.

    """
    header = [f"From {source} of LocalAI. Settings without a counterpart:"]
    texts: list[str] = []
    drafts: list[ManifestDraft] = []
    for document in read_documents(text, source):
        config, content = ForeignConfig(document), document.root.content
        places: list[tuple[str | int, ...]] = (
            [(index,) for index in range(len(content))] if isinstance(content, list) else [()]
        )
        for place in places:
            model = config.section(*place)
            if model is None:
                config.refuse(place, "expected a model: name, backend, parameters")
                continue
            draft, group = _model(model, context)
            header.extend(
                model.omission_lines(_REASONS, "LocalAI only; the fleet has no such setting")
            )
            model.raise_problems()
            drafts.append(draft)
            texts.extend([group] if group else [])
        config.raise_problems()
        if not drafts:
            config.refuse((), "names no models")
            config.raise_problems()
    groups = "".join(f"{group}---\n" for group in dict.fromkeys(texts))
    return join_manifests(header, []) + groups + join_manifests([], drafts)


def _model(model: ForeignConfig, context: LocalAiContext) -> tuple[ManifestDraft, str]:
    """Return the deployment, and the YAML of its group if it has one."""
    name = model.text("name")
    path = model.text("parameters", "model") or model.text("model")
    if path is None:
        model.refuse(("parameters",), "names no model", "Add: parameters: {model: ORG/MODEL}")
    path = (path or "model").removeprefix("huggingface://").removeprefix("https://huggingface.co/")
    draft = ManifestDraft(
        kind="ModelDeployment", name=object_name(name or path, "model"), source=model
    )
    draft.put("spec.model.adapter", model.text("lora_adapter"), "lora_adapter")
    draft.put("spec.model.draft.path", model.text("draft_model"), "draft_model")
    if model.find_path("draft_model"):
        draft.put("spec.model.draft.tokens", model.integer("n_draft", least=1), "n_draft")
    names: list[Tree] = [*served_names(draft.name, name)]
    draft.put("spec.servedNames", names or None, "name")
    draft.put("spec.contextLength", model.integer("context_size", least=1), "context_size")
    kind = _kind(model)
    given = _options(model, draft)
    if kind == "together" and model.text("backend"):
        given = _with_defaults(given, context)
    host_file = given.get("hostfile")
    draft.put_model(path, "parameters", "model")
    if kind == "alone":
        return draft, ""
    if host_file is None:
        # LocalAI's peers split the model over all of them. An adapter or a draft model needs one Mac.
        if not (model.find_path("lora_adapter") or model.find_path("draft_model")):
            draft.put("spec.sharding", "Auto", "backend")
            draft.notes.append(
                "sharding: Auto: one Mac where the model has room, else a ShardGroup (`fleetctl import hostfile`, or one with a "
                "selector)"
            )
        return draft, ""
    backend: Backend = "jaccl" if given.get("distributed_backend") == "jaccl" else "ring"
    file = read_hostfile(*context.host_file(host_file))
    if len(file.hosts) == 1:
        pool = one_mac_pool(file, GroupOptions(name=f"{draft.name}-mac", nodes=context.nodes))
        draft.put("spec.placement.pools", [f"{draft.name}-mac"])
        return draft, pool
    options = GroupOptions(name=f"{draft.name}-group", nodes=context.nodes, backend=backend)
    draft.put("spec.sharding", options.name)
    return draft, build_group(file, options).manifest()


def _kind(model: ForeignConfig) -> str:
    """Return "alone" for a backend on one Mac, "together" for several; refuse backends other than MLX."""
    word = model.text("backend")
    if word is not None and word not in _BACKENDS:
        model.refuse(
            ("backend",),
            f"is {word[:40]}, which does not use models in MLX format",
            "Only mlx and mlx-distributed can be converted; look for the model on mlx-community",
        )
    return _BACKENDS.get(word or "mlx", "alone")


def _with_defaults(options: dict[str, str], context: LocalAiContext) -> dict[str, str]:
    """Return the options, completed from LocalAI's environment variables."""
    defaults = {
        "hostfile": context.default_host_file,
        "distributed_backend": context.default_backend,
    }
    return {name: value for name, value in defaults.items() if value} | options


def _put_sampling(draft: ManifestDraft, name: str, text: str, *came_from: str | int) -> None:
    """Set the field of spec.sampling that requests without the parameter get."""
    ours = _SAMPLING[name]
    try:
        value: Tree = int(text) if ours in _INTEGERS else float(text)
    except ValueError:
        draft.source.refuse(came_from, f"{name} must be a number, got {text[:40]!r}")
        return
    draft.put(f"spec.sampling.{ours}", value, *came_from)


def _options(model: ForeignConfig, draft: ManifestDraft) -> dict[str, str]:
    """Return the options of groups, and set those of sampling; the others are reported as omissions."""
    for name in _SAMPLING:
        given = model.text("parameters", name)
        if given is not None:
            _put_sampling(draft, name, given, "parameters", name)
    group_options: dict[str, str] = {}
    for index in range(model.count("options")):
        option = model.text("options", index) or ""
        name, _, value = option.partition(":")
        if name in ("hostfile", "distributed_backend"):
            group_options[name] = value
        elif name in _IN_OPTIONS:
            _put_sampling(draft, name, value, "options", index)
        else:
            why = _OPTIONS.get(name, "not one of the backend's options for MLX")
            model.explain(("options", index), why)
    known = {"ring": "ring", "jaccl": "jaccl"}
    if group_options.get("distributed_backend", "ring") not in known:
        model.refuse(("options",), "distributed_backend must be ring or jaccl")
    return group_options
