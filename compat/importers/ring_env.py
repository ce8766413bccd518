"""Importer of mlx_distributed_ring_inference_v2's .env: a ShardGroup and its ModelDeployment. Pure.

Names and defaults come from its `.env.example` and configuration manager (2026-02).
"""

import re
from collections.abc import Mapping
from typing import Final

from compat.importers.drafts import (
    ONE_AT_A_TIME,
    ManifestDraft,
    NodeFinder,
    header,
    join_manifests,
    positive,
    resolve_nodes,
)
from compat.importers.source import EnvTool, Source, read_env
from manifests.trees import Tree
from schemas import duration
from schemas.meta import object_name

_MODEL = "mlx-community/DeepSeek-Coder-V2-Lite-Instruct-8bit"
_API_HOST, _WORKERS = "192.168.5.1", "192.168.5.2"
_NO_FILES = "requests are not passed through files"
_LOGS = "gateways and agents keep the logs: fleetctl logs"
_OPEN_FILES = "a gateway raises its own limit as far as the system allows"
_REASONS: Final[Mapping[str, str]] = {
    "MODEL_CACHE_DIR": "agents look below their --models-dir; put the model there on each Mac",
    "API_PORT": "clients connect to the gateway: fleet-gateway --port (default 4000)",
    "SOCKET_PATH": "an engine and its HTTP server are one process",
    **dict.fromkeys(("REQUEST_FILE_PATH", "RESPONSE_FILE_PATH"), _NO_FILES),
    **dict.fromkeys(("SERVER_LOG_PATH", "API_LOG_PATH"), _LOGS),
    **dict.fromkeys(("FILE_DESCRIPTOR_SOFT_LIMIT", "FILE_DESCRIPTOR_HARD_LIMIT"), _OPEN_FILES),
    "KV_CACHE_RESERVED_MEMORY_MB": "the fleet computes the cache size from contextLength and concurrency",
    "MAX_PROMPT_LEN_BYTES": "contextLength limits the prompt, in tokens",
    "POLL_INTERVAL_SECONDS": "the fleet does not poll",
    "MODEL_LOAD_WAIT_SECONDS": "a replica serves requests once it has passed a probe",
    "LOG_LEVEL": "each process of the fleet has its own --log-level",
    "WORKER_SSH": "the fleet starts nothing over ssh; each Mac's agent starts its rank",
}
# Variables that become fields: LOG_LEVEL or API_PORT alone could belong to any tool.
_TOOL = EnvTool(
    name="mlx_distributed_ring_inference",
    known=(
        *("MODEL_REPO", "API_HOST", "WORKER_HOSTS", "NUM_DEVICES", "DISTRIBUTED_BACKEND"),
        *("KV_CACHE_MAX_SIZE", "MAX_SEQUENCE_LENGTH", "REQUEST_TIMEOUT_SECONDS"),
    ),
)


def convert(text: str, source: str, *, name: str, nodes: NodeFinder) -> str:
    """Convert the file to manifests.

    Raises:
        ManifestErrors: all problems of the file, with their lines.

    """
    env = Source(read_env(text, source, _TOOL))
    drafts = [_group(env, name, nodes), _deployment(env, name)]
    omitted = env.omission_lines(_REASONS)
    env.raise_problems()
    return join_manifests(header(source, _TOOL.name, omitted), drafts)


def _group(env: Source, name: str, finder: NodeFinder) -> ManifestDraft:
    draft = ManifestDraft(kind="ShardGroup", name=name, source=env)
    main = env.text("API_HOST") or _API_HOST
    workers = env.text_list("WORKER_HOSTS") or [_WORKERS]
    logins = [] if finder.given else env.text_list("WORKER_SSH")
    if len(logins) != len(workers):
        logins = [""] * len(workers)
    pairs = zip(logins, workers, strict=True)
    hosts = [(("API_HOST",), (main,)), *((("WORKER_HOSTS",), pair) for pair in pairs)]
    members: list[Tree] = []
    for node, address in zip(resolve_nodes(env, hosts, finder), (main, *workers), strict=False):
        is_numeric = re.fullmatch(r"[0-9.]+", address)
        members.append({"node": node, **({"addresses": [address]} if is_numeric else {})})
    draft.put("spec.members", members, "WORKER_HOSTS")
    size, names = env.integer("NUM_DEVICES", least=1), 1 + len(workers)
    if size is not None and size != names:
        message = f"is {size}, but API_HOST and WORKER_HOSTS name {names} Macs"
        env.refuse(("NUM_DEVICES",), message, "Make them agree")
    backend = env.choice({"ring": "ring", "jaccl": "jaccl"}, "DISTRIBUTED_BACKEND") or "ring"
    draft.put("spec.backend", backend, "DISTRIBUTED_BACKEND")
    # In this tool every rank runs model.shard(), which splits heads and feed-forward layers.
    draft.put("spec.parallelism", "Tensor")
    if backend == "jaccl":
        draft.notes.append("RDMA devices: taken from the agents' reports")
    return draft


def _deployment(env: Source, group: str) -> ManifestDraft:
    model = env.text("MODEL_REPO") or _MODEL
    draft = ManifestDraft(kind="ModelDeployment", name=object_name(model, "model"), source=env)
    draft.put_model(model, "MODEL_REPO")
    draft.put("spec.servedNames", [model] if model != draft.name else None, "MODEL_REPO")
    window = env.integer("KV_CACHE_MAX_SIZE", least=1)
    if window is not None and window < (env.integer("MAX_SEQUENCE_LENGTH", least=1) or 4096):
        draft.put("spec.kvCache.window", window, "KV_CACHE_MAX_SIZE")
    elif window is not None:
        why = "contextLength is not longer, so no token is ever dropped"
        draft.notes.append(f"KV_CACHE_MAX_SIZE {window}: {why}")
    draft.put("spec.concurrency", 1)
    draft.notes.append(ONE_AT_A_TIME)
    draft.put("spec.sharding", group)
    # Its README prints data["performance"].
    draft.put("spec.performance", "Always")
    draft.put_all(
        (
            ("spec.contextLength", positive, "MAX_SEQUENCE_LENGTH"),
            ("spec.sampling.maxTokens", positive, "DEFAULT_MAX_TOKENS"),
            ("spec.routing.timeouts.request", _duration, "REQUEST_TIMEOUT_SECONDS"),
        )
    )
    return draft


def _duration(env: Source, key: str) -> Tree:
    seconds = env.integer(key, least=1)
    return None if seconds is None else duration.show(seconds)
