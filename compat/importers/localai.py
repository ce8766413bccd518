"""Importer of LocalAI's model YAML and host files: ModelDeployments and ShardGroups. Pure.

Accepts one model, several documents, or a list of models (--models-config-file). Field names come from LocalAI's
docs/content/features/mlx-distributed.md and docs/content/advanced/model-configuration.md (2026-09).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from compat.importers.drafts import (
    GroupMaker,
    ManifestDraft,
    Place,
    header,
    join_manifests,
    positive,
    served_names,
)
from compat.importers.source import Source, read_documents
from manifests.trees import Tree
from schemas.meta import object_name
from schemas.shardgroup import Backend

# Parameters of the model that requests may leave out, and those of spec.sampling.
_SAMPLING: Final = {
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
# Options of the backend that are parameters of the model, too.
_OPTIONS = ("max_tokens", "temperature", "temp", "top_p")
_NO_OPTION = "not one of the backend's options for MLX"
_ANNOTATION = "add it as an annotation if it should be visible"
_REASONS: Final[Mapping[str, str]] = {
    "parameters": "clients set it in each request",
    "backend": "all engines of the fleet use MLX",
    "template": "the engine uses the chat template of the model folder",
    "stopwords": "clients set stop; the model folder defines the end of a turn",
    "options": _NO_OPTION,
    "threads": "MLX runs on the GPU",
    "f16": "the model folder defines the number format",
    "gpu_layers": "all layers run on the GPU",
    "mmap": "engines read safetensors as MLX does",
    "mmlock": "engines keep their memory wired",
    "function": "the model's own template defines tool calls",
    **dict.fromkeys(("description", "usage"), _ANNOTATION),
    "download_files": "put the model below each agent's --models-dir",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAiContext:
    """Context of the conversion."""

    make_group: GroupMaker
    default_host_file: str = ""
    """Host file of distributed models whose options name none (MLX_DISTRIBUTED_HOSTFILE); empty: one Mac."""
    default_backend: str = ""
    """Backend of distributed models whose options name none (MLX_DISTRIBUTED_BACKEND); empty: ring."""


def convert(text: str, source: str, context: LocalAiContext) -> str:
    """Convert the file to manifests.

    Raises:
        ManifestErrors: all problems of the file or its host file, with their lines.

    """
    omitted: list[str] = []
    groups: list[str] = []
    drafts: list[ManifestDraft] = []
    for document in read_documents(text, source):
        config, content = Source(document), document.root.content
        is_list = isinstance(content, list)
        places: list[Place] = [(n,) for n in range(config.count())] if is_list else [()]
        for place in places:
            model = config.section(*place)
            if model is None:
                config.refuse(place, "expected a model: name, backend, parameters")
                continue
            draft, group = _model(model, context)
            omitted += model.omission_lines(_REASONS)
            model.raise_problems()
            drafts.append(draft)
            groups += [group] if group and group not in groups else []
        if not drafts and not config.record.problems:
            config.refuse((), "names no models")
        config.raise_problems()
    return join_manifests(header(source, "LocalAI", omitted), [*groups, *drafts])


def _model(model: Source, context: LocalAiContext) -> tuple[ManifestDraft, str]:
    """Return the deployment, and the YAML of its group or pool if it has one."""
    name = model.text("name")
    path = model.text("parameters", "model") or model.text("model")
    if path is None:
        model.refuse(("parameters",), "names no model", "Add: parameters: {model: ORG/MODEL}")
    path = (path or "model").removeprefix("huggingface://").removeprefix("https://huggingface.co/")
    draft = ManifestDraft(
        kind="ModelDeployment", name=object_name(name or path, "model"), source=model
    )
    has_draft = model.find_path("draft_model") is not None
    draft.put_all(
        (
            ("spec.model.adapter", Source.text, "lora_adapter"),
            ("spec.model.draft.path", Source.text, "draft_model"),
            *((("spec.model.draft.tokens", positive, "n_draft"),) if has_draft else ()),
        )
    )
    draft.put("spec.servedNames", served_names(draft.name, name), "name")
    draft.put("spec.contextLength", positive(model, "context_size"), "context_size")
    backend = model.text("backend")
    if backend not in (None, "mlx", "mlx-distributed"):
        model.refuse(
            ("backend",),
            f"is {backend[:40]}, which does not use models in MLX format",
            "Only mlx and mlx-distributed can be converted; look for the model on mlx-community",
        )
    options = _options(model, draft)
    draft.put_model(path, "parameters", "model")
    if backend != "mlx-distributed":
        return draft, ""
    host_file = options.get("hostfile") or context.default_host_file
    if not host_file:
        # LocalAI's peers split the model over all of them. An adapter or a draft model needs one Mac.
        if not (model.find_path("lora_adapter") or has_draft):
            draft.put("spec.sharding", "Auto", "backend")
            draft.notes.append(
                "sharding: Auto: one Mac where the model has room, else a ShardGroup (`fleetctl import hostfile`, or "
                "one with a selector)"
            )
        return draft, ""
    word = options.get("distributed_backend") or context.default_backend
    kind: Backend = "jaccl" if word == "jaccl" else "ring"
    group, pool = f"{draft.name}-group", f"{draft.name}-mac"
    has_several, text = context.make_group(
        host_file, group=group, pool=pool, backend=kind, fast_synch=None
    )
    draft.put_group(group=group if has_several else "", pool=pool)
    return draft, text


def _options(model: Source, draft: ManifestDraft) -> dict[str, str]:
    """Return the options of groups, and set those of sampling; the others are reported as omissions."""
    for name in _SAMPLING:
        _put_sampling(draft, name, model.text("parameters", name), "parameters", name)
    group_options: dict[str, str] = {}
    for index in range(model.count("options")):
        name, _, value = (model.text("options", index) or "").partition(":")
        if name in ("hostfile", "distributed_backend"):
            group_options[name] = value
        elif name in _OPTIONS:
            _put_sampling(draft, name, value, "options", index)
        else:
            is_code = name == "trust_remote_code"
            why = "the fleet never runs code of a model" if is_code else _NO_OPTION
            model.explain(("options", index), why)
    if group_options.get("distributed_backend", "ring") not in ("ring", "jaccl"):
        model.refuse(("options",), "distributed_backend must be ring or jaccl")
    return group_options


def _put_sampling(draft: ManifestDraft, name: str, text: str | None, *came_from: str | int) -> None:
    """Set the field of spec.sampling that requests without the parameter get."""
    if text is None:
        return
    ours = _SAMPLING[name]
    try:
        value: Tree = int(text) if ours in _INTEGERS else float(text)
    except ValueError:
        draft.source.refuse(came_from, f"{name} must be a number, got {text[:40]!r}")
        return
    draft.put(f"spec.sampling.{ours}", value, *came_from)
