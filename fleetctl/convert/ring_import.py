""".env of mlx_distributed_ring_inference_v2 to a ShardGroup and the ModelDeployment that runs on it. Pure.

Names and defaults are of its `.env.example` and `config/manager.py` (2026-02).
"""

import re
from collections.abc import Sequence

from fleetctl.convert.foreign_config import ForeignConfig, OmissionReason
from fleetctl.convert.manifest_drafts import (
    ManifestDraft,
    join_manifests,
    object_name,
    resolve_nodes,
)
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import Document
from manifests.trees import Tree
from manifests.yaml.nodes import MappingEntry, Mark, YamlNode
from schemas import duration

_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*")
_MODEL = "mlx-community/DeepSeek-Coder-V2-Lite-Instruct-8bit"
_API_HOST, _WORKERS = "192.168.5.1", "192.168.5.2"

_REASONS = {
    "MODEL_CACHE_DIR": OmissionReason(
        says="agents look below their own --models-dir; put the model there on each Mac"
    ),
    "API_PORT": OmissionReason(
        says="clients ask the gateway: fleet-gateway --port, 4000 unless it is said"
    ),
    "SOCKET_PATH": OmissionReason(says="an engine and its HTTP server are one process"),
    "REQUEST_FILE_PATH": OmissionReason(says="nothing is passed through files"),
    "RESPONSE_FILE_PATH": OmissionReason(says="nothing is passed through files"),
    "SERVER_LOG_PATH": OmissionReason(says="agents keep the logs: fleetctl logs"),
    "API_LOG_PATH": OmissionReason(says="gateways and agents keep the logs: fleetctl logs"),
    "KV_CACHE_RESERVED_MEMORY_MB": OmissionReason(
        says="the fleet works out what the cache needs from contextLength and concurrency"
    ),
    "MAX_PROMPT_LEN_BYTES": OmissionReason(says="contextLength bounds the prompt, in tokens"),
    "DEFAULT_MAX_TOKENS": OmissionReason(says="clients say max_tokens themselves"),
    "POLL_INTERVAL_SECONDS": OmissionReason(says="nothing polls"),
    "MODEL_LOAD_WAIT_SECONDS": OmissionReason(
        says="a replica serves once it has answered a question"
    ),
    "FILE_DESCRIPTOR_SOFT_LIMIT": OmissionReason(
        says="a gateway raises its own limit as far as it may"
    ),
    "FILE_DESCRIPTOR_HARD_LIMIT": OmissionReason(
        says="a gateway raises its own limit as far as it may"
    ),
    "LOG_LEVEL": OmissionReason(says="each process of the fleet has its own --log-level"),
    "WORKER_SSH": OmissionReason(
        says="nothing is started over ssh; each Mac's own agent starts its rank"
    ),
}
# Those that become fields; LOG_LEVEL or API_PORT alone may be anybody's.
_KNOWN = {
    *("MODEL_REPO", "API_HOST", "WORKER_HOSTS", "NUM_DEVICES", "DISTRIBUTED_BACKEND"),
    *("KV_CACHE_MAX_SIZE", "MAX_SEQUENCE_LENGTH", "REQUEST_TIMEOUT_SECONDS"),
}


def convert(text: str, source: str, *, name: str, nodes: Sequence[str]) -> str:
    """Return the manifests.

    Raises:
        ManifestErrors: everything that is wrong with the file, with its lines.

    """
    env = ForeignConfig(_document(text, source))
    group = _group(env, name, nodes)
    deployment = _deployment(env, group)
    left = env.left(_REASONS, "nobody in the fleet asks for it")
    env.checked()
    header = [f"From {source} of mlx_distributed_ring_inference. What has no counterpart:", *left]
    return join_manifests(header, [group, deployment])


def _document(text: str, source: str) -> Document:
    """Return the variables as a mapping that knows its lines; later ones win, as python-dotenv has it."""
    entries: dict[str, MappingEntry] = {}
    problems: list[ManifestError] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            problems.append(
                ManifestError(
                    source=source, line=number, column=1, message="expected NAME=VALUE", hint=""
                )
            )
            continue
        mark = Mark(line=number, column=1)
        said = _unquoted(match[2])
        entries[match[1]] = MappingEntry(
            mark=mark, node=YamlNode(mark=mark, content=said, text=said)
        )
    if not entries:
        hint = "Did you mean import mesh, serving or localai?" if problems else ""
        message = "is no .env file: no line is NAME=VALUE" if problems else "sets no variables"
        problems = [ManifestError(source=source, message=message, hint=hint)]
    elif not (entries.keys() & _KNOWN):
        some = "MODEL_REPO, API_HOST, WORKER_HOSTS"
        message = f"sets no variable of mlx_distributed_ring_inference, such as {some}"
        problems.append(ManifestError(source=source, message=message))
    if problems:
        raise ManifestErrors(problems)
    return Document(source=source, root=YamlNode(mark=Mark(line=1, column=1), content=entries))


def _unquoted(value: str) -> str:
    if value[:1] in ("'", '"'):
        end = value.find(value[0], 1)
        return value[1:end] if end > 0 else value
    return "" if value.startswith("#") else re.split(r"\s+#", value, maxsplit=1)[0]


def _group(env: ForeignConfig, name: str, given: Sequence[str]) -> ManifestDraft:
    draft = ManifestDraft(kind="ShardGroup", name=name, source=env)
    main = env.text("API_HOST") or _API_HOST
    workers = env.texts("WORKER_HOSTS") or [_WORKERS]
    logins = env.texts("WORKER_SSH")
    # A login by host name says which Mac it is; an address does not.
    named = (
        [login.rpartition("@")[2] for login in logins] if len(logins) == len(workers) else workers
    )
    hosts = [(("API_HOST",), main), *((("WORKER_HOSTS",), host) for host in named)]
    nodes = resolve_nodes(env, hosts, given)
    members: list[Tree] = []
    for node, address in zip(nodes, (main, *workers), strict=False):
        is_numeric = bool(re.fullmatch(r"[0-9.]+", address))
        members.append({"node": node, **({"addresses": [address]} if is_numeric else {})})
    draft.put("spec.members", members, "WORKER_HOSTS")
    size = env.whole("NUM_DEVICES", least=1)
    if size is not None and size != 1 + len(workers):
        env.refuse(
            ("NUM_DEVICES",),
            f"is {size}, and API_HOST with WORKER_HOSTS names {1 + len(workers)} Macs",
            "Make them agree",
        )
    backends = {"ring": "ring", "jaccl": "jaccl"}
    backend = env.one_of(backends, "DISTRIBUTED_BACKEND") or "ring"
    draft.put("spec.backend", backend, "DISTRIBUTED_BACKEND")
    # Every rank ran model.shard(): heads and feed-forward split, nothing else.
    draft.put("spec.parallelism", "Tensor")
    if backend == "jaccl":
        draft.notes.append("RDMA devices: what the agents report is taken")
    return draft


def _deployment(env: ForeignConfig, group: ManifestDraft) -> ManifestDraft:
    model = env.text("MODEL_REPO") or _MODEL
    draft = ManifestDraft(kind="ModelDeployment", name=object_name(model, "model"), source=env)
    draft.put("spec.model.path", model, "MODEL_REPO")
    draft.put("spec.servedNames", [model] if model != draft.name else None, "MODEL_REPO")
    context = env.whole("MAX_SEQUENCE_LENGTH", least=1)
    draft.put("spec.contextLength", context, "MAX_SEQUENCE_LENGTH")
    window = env.whole("KV_CACHE_MAX_SIZE", least=1)
    if window is not None and window < (context or 4096):
        draft.put("spec.kvCache.window", window, "KV_CACHE_MAX_SIZE")
    elif window is not None:
        draft.notes.append(
            f"KV_CACHE_MAX_SIZE {window}: contextLength is no longer, so nothing is ever forgotten"
        )
    draft.put("spec.concurrency", 1)
    draft.notes.append("concurrency: it answered one request at a time; 4 is the fleet's default")
    draft.put("spec.sharding", group.name)
    limit = env.whole("REQUEST_TIMEOUT_SECONDS", least=1)
    if limit is not None:
        draft.put("spec.routing.timeouts.request", duration.show(limit), "REQUEST_TIMEOUT_SECONDS")
    return draft
