"""Conversion of mlx-jaccl-cluster's variables and host file to a ShardGroup and its ModelDeployment. Pure.

Names and defaults come from the tables of its README (2026-03). Variables come from a file of NAME=VALUE lines or from
the head of a Makefile.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fleetctl.convert.env_file import EnvTool, read_env
from fleetctl.convert.foreign_config import ForeignConfig, OmissionReason
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
from schemas import duration

_HOSTFILE = "hostfiles/hosts-2node.json"
_QUEUE_MAX, _REQ_TIMEOUT = 8, 120
_MEASURE = "the cables of a group are measured by fleetctl fabric bench GROUP"
_OFFLINE = "agents fetch a model once for the fleet; a model that is a folder is never fetched"
_REASONS = {
    "HTTP_HOST": OmissionReason(text="set the gateway's address with its flag --host"),
    "HTTP_PORT": OmissionReason(text="set the gateway's port with its flag --port (default 4000)"),
    "CTRL_HOST": OmissionReason(text="the ranks of a group find each other through the store"),
    "CTRL_PORT": OmissionReason(text="the ranks of a group find each other through the store"),
    "RDMA_ROUNDS": OmissionReason(text=f"{_MEASURE} --rounds N"),
    "RDMA_SIZES": OmissionReason(text=f"{_MEASURE} --sizes 4K,256K,4M,64M"),
    "RDMA_VERBOSE": OmissionReason(text=f"{_MEASURE} --verbose"),
    "REMOTE": OmissionReason(text="fleetctl node add HOST installs an agent on another Mac"),
    "MODEL": OmissionReason(text="fleetctl models pull ORGANISATION/NAME fetches a model"),
    "HF_HUB_OFFLINE": OmissionReason(text=_OFFLINE),
    "TRANSFORMERS_OFFLINE": OmissionReason(text=_OFFLINE),
}
_TOOL = EnvTool(
    name="mlx-jaccl-cluster",
    known=frozenset(
        {"MODEL_DIR", "HOSTFILE", "QUEUE_MAX", "REQ_TIMEOUT", "CTRL_HOST", "CTRL_PORT", "MODEL_ID"}
    ),
    some="MODEL_DIR, HOSTFILE, QUEUE_MAX",
    has_makefiles=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JacclContext:
    """Context of the conversion: access to host files, the nodes of the Macs, and the model."""

    host_file: Callable[[str], tuple[str, str]]
    """Returns text and name of the host file at the path in the variables; raises ManifestErrors."""
    name: str
    """Name of the ShardGroup."""
    nodes: NodeNames = field(default_factory=NodeNames)
    model: str = ""
    """The model folder, for files that do not set MODEL_DIR."""


def convert(text: str, source: str, context: JacclContext) -> str:
    """Convert the variables and the host file to manifests.

    Raises:
        ManifestErrors: all problems of either file, with their lines.

    """
    env = ForeignConfig(read_env(text, source, _TOOL))
    deployment = _deployment(env, context)
    host_file = _given(env, "HOSTFILE") or _HOSTFILE
    # The variables of every rank; the tool passes them with --env.
    fast = env.text("MLX_METAL_FAST_SYNCH")
    omitted = env.omission_lines(_REASONS, "the fleet has no such setting")
    env.raise_problems()
    file = read_hostfile(*context.host_file(host_file))
    if len(file.hosts) == 1:
        group = one_mac_pool(file, GroupOptions(name=context.name, nodes=context.nodes))
        deployment.put("spec.placement.pools", [context.name])
    else:
        # The tool starts every host file with it.
        options = GroupOptions(name=context.name, nodes=context.nodes, backend="jaccl")
        found = build_group(file, options)
        if fast is not None:
            spec = found.group.spec
            variables = {**spec.environment, "MLX_METAL_FAST_SYNCH": fast}
            changed = spec.model_copy(update={"environment": variables})
            found = replace(found, group=found.group.model_copy(update={"spec": changed}))
        group = found.manifest()
        deployment.put("spec.sharding", context.name)
    header = [
        f"From {source} of mlx-jaccl-cluster. Settings without a counterpart:",
        *omitted,
    ]
    return join_manifests(header, []) + f"{group}---\n" + join_manifests([], [deployment])


def _given(env: ForeignConfig, name: str) -> str | None:
    """Return the variable; refuse an expression of make or of the shell, whose value only they know."""
    text = env.text(name)
    if text is not None and "$" in text:
        env.refuse((name,), f"is an expression: {text[:60]}", "Write its value")
        return None
    return text


def _deployment(env: ForeignConfig, context: JacclContext) -> ManifestDraft:
    folder = _given(env, "MODEL_DIR") or context.model
    if not folder:
        env.refuse((), "names no model: MODEL_DIR is not set", "Add MODEL_DIR=..., or give --model")
    bare = folder.rstrip("/").rpartition("/")[2] or "model"
    draft = ManifestDraft(kind="ModelDeployment", name=object_name(bare, "model"), source=env)
    # `~` is another folder on each Mac; agents look for relative paths below their --models-dir.
    path = bare if folder.startswith("~") else folder
    draft.put("spec.model.path", path or None, "MODEL_DIR")
    if path != folder:
        draft.notes.append(f"{folder} is {bare} below each agent's --models-dir")
    names: list[Tree] = [*served_names(draft.name, _given(env, "MODEL_ID") or bare)]
    draft.put("spec.servedNames", names or None, "MODEL_ID")
    draft.put("spec.concurrency", 1)
    draft.notes.append(
        "concurrency: the tool served one request at a time; the fleet's default is Auto"
    )
    depth = env.integer("QUEUE_MAX")
    queue: dict[str, Tree] = {"concurrency": 1, "depth": _QUEUE_MAX if depth is None else depth}
    draft.put("spec.routing.queueing", queue, "QUEUE_MAX")
    limit = env.integer("REQ_TIMEOUT", least=1) or _REQ_TIMEOUT
    draft.put("spec.routing.timeouts.request", duration.show(limit), "REQ_TIMEOUT")
    return draft
