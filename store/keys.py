"""The layout of keys, spelled only here. One writer per key; see docs/architecture.md, section 2."""

ROOT = "/mlx-fleet/v1"

SPEC_PREFIX = f"{ROOT}/spec/"
STATUS_PREFIX = f"{ROOT}/status/"
RANK_PREFIX = f"{ROOT}/rank/"
LEASE_PREFIX = f"{ROOT}/lease/"
NODE_LEASE_PREFIX = f"{LEASE_PREFIX}Node/"
ENDPOINT_PREFIX = f"{ROOT}/endpoint/"
EVENT_PREFIX = f"{ROOT}/event/"
ELECTION_RECONCILER = f"{ROOT}/election/reconciler"


def spec_prefix(kind: str) -> str:
    return f"{SPEC_PREFIX}{kind}/"


def spec_key(kind: str, name: str) -> str:
    return f"{SPEC_PREFIX}{kind}/{name}"


def status_prefix(kind: str) -> str:
    return f"{STATUS_PREFIX}{kind}/"


def status_key(kind: str, name: str) -> str:
    return f"{STATUS_PREFIX}{kind}/{name}"


def rank_key(replica: str, rank: int) -> str:
    """Return where the agent that runs the rank reports.

    A prefix of its own beside status/: an informer of the statuses of one kind must not have to
    tell two kinds of document apart.
    """
    return f"{RANK_PREFIX}{replica}/{rank}"


def node_lease_key(node: str) -> str:
    return f"{NODE_LEASE_PREFIX}{node}"


def endpoint_key(replica: str) -> str:
    return f"{ENDPOINT_PREFIX}{replica}"


def event_key(name: str) -> str:
    return f"{EVENT_PREFIX}{name}"


def kind_and_name(key: str) -> tuple[str, str]:
    """Return kind and name (with what follows it) of a key below spec/, status/ and the like.

    Raises:
        ValueError: the key is not of that form.

    """
    _, _, rest = key.removeprefix(f"{ROOT}/").partition("/")
    kind, slash, name = rest.partition("/")
    if not (key.startswith(f"{ROOT}/") and slash and kind and name):
        raise ValueError(f"{key} is no key of an object")
    return kind, name


def prefix_end(prefix: str) -> str:
    """Return the first key after all keys that begin with `prefix`."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
