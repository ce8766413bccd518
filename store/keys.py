"""The layout of keys, spelled only here. One writer per key; see docs/architecture.md, section 2.

What an agent writes lies below a prefix with its node's name, and what anybody records below one with
the recorder's: etcd's permissions are ranges of keys (docs/adr/0013-keys-by-writer.md).
"""

ROOT = "/mlx-fleet/v1"

SPEC_PREFIX = f"{ROOT}/spec/"
STATUS_PREFIX = f"{ROOT}/status/"
RANK_PREFIX = f"{ROOT}/rank/"
LEASE_PREFIX = f"{ROOT}/lease/"
NODE_LEASE_PREFIX = f"{LEASE_PREFIX}Node/"
GATEWAY_LEASE_PREFIX = f"{LEASE_PREFIX}Gateway/"
# What the leading reconciler says of nodes; their statuses are their agents'.
LIFE_PREFIX = f"{ROOT}/life/"
NODE_LIFE_PREFIX = f"{LIFE_PREFIX}Node/"
ENDPOINT_PREFIX = f"{ROOT}/endpoint/"
# A test of the cables that a fleetctl waits for, by its group; and what agents say of it.
FABRIC_TEST_PREFIX = f"{ROOT}/fabrictest/"
FABRIC_RANK_PREFIX = f"{ROOT}/fabricrank/"
# What a source of manifests has applied, by its name.
APPLY_SET_PREFIX = f"{ROOT}/applyset/"
# The right to read an agent's or a gateway's logs, under a short lease.
TICKET_PREFIX = f"{ROOT}/ticket/"
EVENT_PREFIX = f"{ROOT}/event/"
ELECTION_PREFIX = f"{ROOT}/election/"
ELECTION_RECONCILER = f"{ELECTION_PREFIX}reconciler"
# There while `fleetctl restore` writes, and while a restore that broke off waits for another.
RESTORING = f"{ROOT}/restoring"
# What lives under a lease: it says who is there now, so no backup has it.
TRANSIENT_PREFIXES = (
    *(LEASE_PREFIX, ENDPOINT_PREFIX, EVENT_PREFIX, ELECTION_PREFIX),
    *(FABRIC_TEST_PREFIX, FABRIC_RANK_PREFIX, TICKET_PREFIX),
)
# No role of an agent or the reconciler may read it; gateways read the hashes of API keys.
SECRET_PREFIX = f"{ROOT}/secret/"
API_KEY_PREFIX = f"{SECRET_PREFIX}ApiKey/"


def spec_prefix(kind: str) -> str:
    return f"{SPEC_PREFIX}{kind}/"


def spec_key(kind: str, name: str) -> str:
    return f"{SPEC_PREFIX}{kind}/{name}"


def status_prefix(kind: str) -> str:
    return f"{STATUS_PREFIX}{kind}/"


def status_key(kind: str, name: str) -> str:
    return f"{STATUS_PREFIX}{kind}/{name}"


def rank_prefix(node: str) -> str:
    """Return what every report of the node's agent begins with."""
    return f"{RANK_PREFIX}{node}/"


def rank_key(node: str, replica: str, rank: int) -> str:
    """Return where the agent that runs the rank reports.

    A prefix of its own beside status/: an informer of the statuses of one kind must not have to
    tell two kinds of document apart.
    """
    return f"{rank_prefix(node)}{replica}/{rank}"


def node_lease_key(node: str) -> str:
    return f"{NODE_LEASE_PREFIX}{node}"


def node_life_key(node: str) -> str:
    return f"{NODE_LIFE_PREFIX}{node}"


def endpoint_prefix(node: str) -> str:
    """Return what every endpoint on the node begins with."""
    return f"{ENDPOINT_PREFIX}{node}/"


def endpoint_key(node: str, replica: str) -> str:
    return f"{endpoint_prefix(node)}{replica}"


def fabric_rank_prefix(node: str) -> str:
    """Return what everything begins with that the node's agent says of tests of the cables."""
    return f"{FABRIC_RANK_PREFIX}{node}/"


def fabric_rank_key(node: str, group: str) -> str:
    return f"{fabric_rank_prefix(node)}{group}"


def ticket_prefix(holder: str) -> str:
    """Return what the tickets begin with that one process takes: `Node/<name>` or `Gateway/<id>`."""
    return f"{TICKET_PREFIX}{holder}/"


def ticket_key(holder: str, ticket: str) -> str:
    return f"{ticket_prefix(holder)}{ticket}"


def named(prefix: str, name: str) -> str:
    """Return the key of one name below a prefix whose keys are names: API keys, gateways, tests of cables, apply sets."""
    return f"{prefix}{name}"


def replica_of(key: str) -> str:
    """Return the replica that a rank's report or an endpoint is about; empty for other keys."""
    for prefix in (RANK_PREFIX, ENDPOINT_PREFIX):
        if key.startswith(prefix):
            _, _, rest = key.removeprefix(prefix).partition("/")
            return rest.partition("/")[0]
    return ""


def event_prefix(source: str) -> str:
    """Return what every event begins with that the source saw: `reconciler`, or `Node/<name>`."""
    return f"{EVENT_PREFIX}{source}/"


def event_key(source: str, name: str) -> str:
    return f"{event_prefix(source)}{name}"


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
