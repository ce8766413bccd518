"""Conversion of mlx_distributed_ring_inference_v2's .env to a ShardGroup and its ModelDeployment. Pure.

Names and defaults come from its `.env.example` and configuration manager (2026-02).
"""

import re

from fleetctl.convert.env_file import EnvTool, read_env
from fleetctl.convert.foreign_config import ForeignConfig, OmissionReason
from fleetctl.convert.manifest_drafts import (
    ManifestDraft,
    join_manifests,
    object_name,
    resolve_nodes,
)
from fleetctl.convert.node_names import NodeNames
from manifests.trees import Tree
from schemas import duration

_MODEL = "mlx-community/DeepSeek-Coder-V2-Lite-Instruct-8bit"
_API_HOST, _WORKERS = "192.168.5.1", "192.168.5.2"

_REASONS = {
    "MODEL_CACHE_DIR": OmissionReason(
        text="agents look below their --models-dir; put the model there on each Mac"
    ),
    "API_PORT": OmissionReason(
        text="clients connect to the gateway: fleet-gateway --port (default 4000)"
    ),
    "SOCKET_PATH": OmissionReason(text="an engine and its HTTP server are one process"),
    "REQUEST_FILE_PATH": OmissionReason(text="requests are not passed through files"),
    "RESPONSE_FILE_PATH": OmissionReason(text="responses are not passed through files"),
    "SERVER_LOG_PATH": OmissionReason(text="agents keep the logs: fleetctl logs"),
    "API_LOG_PATH": OmissionReason(text="gateways and agents keep the logs: fleetctl logs"),
    "KV_CACHE_RESERVED_MEMORY_MB": OmissionReason(
        text="the fleet computes the cache size from contextLength and concurrency"
    ),
    "MAX_PROMPT_LEN_BYTES": OmissionReason(text="contextLength limits the prompt, in tokens"),
    "POLL_INTERVAL_SECONDS": OmissionReason(text="the fleet does not poll"),
    "MODEL_LOAD_WAIT_SECONDS": OmissionReason(
        text="a replica serves requests once it has passed a probe"
    ),
    "FILE_DESCRIPTOR_SOFT_LIMIT": OmissionReason(
        text="a gateway raises its own limit as far as the system allows"
    ),
    "FILE_DESCRIPTOR_HARD_LIMIT": OmissionReason(
        text="a gateway raises its own limit as far as the system allows"
    ),
    "LOG_LEVEL": OmissionReason(text="each process of the fleet has its own --log-level"),
    "WORKER_SSH": OmissionReason(
        text="the fleet starts nothing over ssh; each Mac's agent starts its rank"
    ),
}
# Variables that become fields. The file must set one of them: LOG_LEVEL or API_PORT alone could belong to any tool.
_KNOWN = frozenset(
    {
        *("MODEL_REPO", "API_HOST", "WORKER_HOSTS", "NUM_DEVICES", "DISTRIBUTED_BACKEND"),
        *("KV_CACHE_MAX_SIZE", "MAX_SEQUENCE_LENGTH", "REQUEST_TIMEOUT_SECONDS"),
    }
)


def convert(text: str, source: str, *, name: str, nodes: NodeNames) -> str:
    """Convert the file to manifests.

    Raises:
        ManifestErrors: all problems of the file, with their lines.

    """
    tool = EnvTool(
        name="mlx_distributed_ring_inference",
        known=_KNOWN,
        some="MODEL_REPO, API_HOST, WORKER_HOSTS",
    )
    env = ForeignConfig(read_env(text, source, tool))
    group = _group(env, name, nodes)
    deployment = _deployment(env, group)
    omitted = env.omission_lines(_REASONS, "the fleet has no such setting")
    env.raise_problems()
    header = [
        f"From {source} of mlx_distributed_ring_inference. Settings without a counterpart:",
        *omitted,
    ]
    return join_manifests(header, [group, deployment])


def _group(env: ForeignConfig, name: str, names: NodeNames) -> ManifestDraft:
    draft = ManifestDraft(kind="ShardGroup", name=name, source=env)
    main = env.text("API_HOST") or _API_HOST
    workers = env.text_list("WORKER_HOSTS") or [_WORKERS]
    logins = [] if names.given else env.text_list("WORKER_SSH")
    if len(logins) != len(workers):
        logins = [""] * len(workers)
    pairs = zip(logins, workers, strict=True)
    hosts = [(("API_HOST",), (main,)), *((("WORKER_HOSTS",), pair) for pair in pairs)]
    nodes = resolve_nodes(env, hosts, names)
    members: list[Tree] = []
    for node, address in zip(nodes, (main, *workers), strict=False):
        is_numeric = bool(re.fullmatch(r"[0-9.]+", address))
        members.append({"node": node, **({"addresses": [address]} if is_numeric else {})})
    draft.put("spec.members", members, "WORKER_HOSTS")
    size = env.integer("NUM_DEVICES", least=1)
    if size is not None and size != 1 + len(workers):
        env.refuse(
            ("NUM_DEVICES",),
            f"is {size}, but API_HOST and WORKER_HOSTS name {1 + len(workers)} Macs",
            "Make them agree",
        )
    backends = {"ring": "ring", "jaccl": "jaccl"}
    backend = env.choice(backends, "DISTRIBUTED_BACKEND") or "ring"
    draft.put("spec.backend", backend, "DISTRIBUTED_BACKEND")
    # In this tool every rank runs model.shard(), which splits heads and feed-forward layers.
    draft.put("spec.parallelism", "Tensor")
    if backend == "jaccl":
        draft.notes.append("RDMA devices: taken from the agents' reports")
    return draft


def _deployment(env: ForeignConfig, group: ManifestDraft) -> ManifestDraft:
    model = env.text("MODEL_REPO") or _MODEL
    draft = ManifestDraft(kind="ModelDeployment", name=object_name(model, "model"), source=env)
    draft.put_model(model, "MODEL_REPO")
    draft.put("spec.servedNames", [model] if model != draft.name else None, "MODEL_REPO")
    context = env.integer("MAX_SEQUENCE_LENGTH", least=1)
    draft.put("spec.contextLength", context, "MAX_SEQUENCE_LENGTH")
    window = env.integer("KV_CACHE_MAX_SIZE", least=1)
    if window is not None and window < (context or 4096):
        draft.put("spec.kvCache.window", window, "KV_CACHE_MAX_SIZE")
    elif window is not None:
        draft.notes.append(
            f"KV_CACHE_MAX_SIZE {window}: contextLength is not longer, so no token is ever dropped"
        )
    most = env.integer("DEFAULT_MAX_TOKENS", least=1)
    draft.put("spec.sampling.maxTokens", most, "DEFAULT_MAX_TOKENS")
    draft.put("spec.concurrency", 1)
    draft.notes.append(
        "concurrency: the tool served one request at a time; the fleet's default is Auto"
    )
    draft.put("spec.sharding", group.name)
    # Its README prints data["performance"].
    draft.put("spec.performance", "Always")
    limit = env.integer("REQUEST_TIMEOUT_SECONDS", least=1)
    if limit is not None:
        draft.put("spec.routing.timeouts.request", duration.show(limit), "REQUEST_TIMEOUT_SECONDS")
    return draft
