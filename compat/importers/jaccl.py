"""Importer of mlx-jaccl-cluster's variables and host file: a ShardGroup and its ModelDeployment. Pure.

Names and defaults come from the tables of its README (2026-03). Variables come from a file of NAME=VALUE lines or from
the head of a Makefile.
"""

from collections.abc import Mapping
from typing import Final

from compat.importers.drafts import (
    ONE_AT_A_TIME,
    GroupMaker,
    ManifestDraft,
    header,
    join_manifests,
    served_names,
)
from compat.importers.source import EnvTool, Source, read_env
from schemas import duration
from schemas.meta import object_name

_HOSTFILE, _QUEUE_MAX, _REQ_TIMEOUT = "hostfiles/hosts-2node.json", 8, 120
_MEASURE = "the cables of a group are measured by fleetctl fabric bench GROUP"
_OFFLINE = "agents fetch a model once for the fleet; a model that is a folder is never fetched"
_RANKS = "the ranks of a group find each other through the store"
_REASONS: Final[Mapping[str, str]] = {
    "HTTP_HOST": "set the gateway's address with its flag --host",
    "HTTP_PORT": "set the gateway's port with its flag --port (default 4000)",
    **dict.fromkeys(("CTRL_HOST", "CTRL_PORT"), _RANKS),
    "RDMA_ROUNDS": f"{_MEASURE} --rounds N",
    "RDMA_SIZES": f"{_MEASURE} --sizes 4K,256K,4M,64M",
    "RDMA_VERBOSE": f"{_MEASURE} --verbose",
    "REMOTE": "fleetctl node add HOST installs an agent on another Mac",
    "MODEL": "fleetctl models pull ORGANISATION/NAME fetches a model",
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), _OFFLINE),
}
_TOOL = EnvTool(
    name="mlx-jaccl-cluster",
    known=(
        *("MODEL_DIR", "HOSTFILE", "QUEUE_MAX", "REQ_TIMEOUT"),
        *("CTRL_HOST", "CTRL_PORT", "MODEL_ID"),
    ),
    has_makefiles=True,
)


def convert(text: str, source: str, *, make_group: GroupMaker, name: str, model: str = "") -> str:
    """Convert the variables and the host file to manifests.

    `name`: of the ShardGroup. `model`: the model folder, for files that do not set MODEL_DIR.

    Raises:
        ManifestErrors: all problems of either file, with their lines.

    """
    env = Source(read_env(text, source, _TOOL))
    draft = _deployment(env, model)
    host_file = _given(env, "HOSTFILE") or _HOSTFILE
    # The variables of every rank; the tool passes them with --env.
    fast = env.text("MLX_METAL_FAST_SYNCH")
    omitted = env.omission_lines(_REASONS)
    env.raise_problems()
    # The tool starts every host file with this backend.
    has_several, group = make_group(
        host_file, group=name, pool=name, backend="jaccl", fast_synch=fast
    )
    draft.put_group(group=name if has_several else "", pool=name)
    return join_manifests(header(source, _TOOL.name, omitted), [group, draft])


def _given(env: Source, name: str) -> str | None:
    """Return the variable; refuse an expression of make or of the shell, whose value only they know."""
    text = env.text(name)
    if text is not None and "$" in text:
        env.refuse((name,), f"is an expression: {text[:60]}", "Write its value")
        return None
    return text


def _deployment(env: Source, model: str) -> ManifestDraft:
    folder = _given(env, "MODEL_DIR") or model
    if not folder:
        env.refuse((), "names no model: MODEL_DIR is not set", "Add MODEL_DIR=..., or give --model")
    bare = folder.rstrip("/").rpartition("/")[2] or "model"
    draft = ManifestDraft(kind="ModelDeployment", name=object_name(bare, "model"), source=env)
    # `~` is another folder on each Mac; agents look for relative paths below their --models-dir.
    path = bare if folder.startswith("~") else folder
    draft.put("spec.model.path", path or None, "MODEL_DIR")
    if path != folder:
        draft.notes.append(f"{folder} is {bare} below each agent's --models-dir")
    model_id = _given(env, "MODEL_ID") or bare
    draft.put("spec.servedNames", served_names(draft.name, model_id), "MODEL_ID")
    draft.put("spec.concurrency", 1)
    draft.notes.append(ONE_AT_A_TIME)
    depth = env.integer("QUEUE_MAX")
    depth = _QUEUE_MAX if depth is None else depth
    draft.put("spec.routing.queueing", {"concurrency": 1, "depth": depth}, "QUEUE_MAX")
    limit_s = env.integer("REQ_TIMEOUT", least=1) or _REQ_TIMEOUT
    draft.put("spec.routing.timeouts.request", duration.show(limit_s), "REQ_TIMEOUT")
    return draft
