"""The layout of keys, defined only here. Every key has one writer; see docs/internals/keys.md.

Keys that an agent writes are below a prefix with its node's name, and events below one with their recorder's name:
etcd's permissions are ranges of keys (docs/adr/0004-one-writer-per-key.md).
"""

ROOT = "/mlx-fleet/v1"

SPEC_PREFIX = f"{ROOT}/spec/"
STATUS_PREFIX = f"{ROOT}/status/"
RANK_PREFIX = f"{ROOT}/rank/"
LEASE_PREFIX = f"{ROOT}/lease/"
NODE_LEASE_PREFIX = f"{LEASE_PREFIX}Node/"
GATEWAY_LEASE_PREFIX = f"{LEASE_PREFIX}Gateway/"
RECONCILER_LEASE_PREFIX = f"{LEASE_PREFIX}Reconciler/"
DASHBOARD_LEASE_PREFIX = f"{LEASE_PREFIX}Dashboard/"
# The leading reconciler's conditions of nodes; the statuses of nodes belong to their agents.
LIFE_PREFIX = f"{ROOT}/life/"
NODE_LIFE_PREFIX = f"{LIFE_PREFIX}Node/"
ENDPOINT_PREFIX = f"{ROOT}/endpoint/"
# Copies of Replicas below the nodes that they concern, so that an agent watches its own only.
ASSIGNMENT_PREFIX = f"{ROOT}/assignment/"
# Exists while the leader keeps those copies: agents watch all Replicas without it.
ASSIGNMENTS_KEPT = f"{ROOT}/assignmentskept"
# What agents must know of each deployment; and the mark that the leader keeps it: agents watch all deployments without it.
MODEL_USE_PREFIX = f"{ROOT}/modeluse/"
MODEL_USES_KEPT = f"{ROOT}/modeluseskept"
# The load of a Mac that gateways cannot see in its answers, by node, under its lease.
LOAD_PREFIX = f"{ROOT}/load/"
# Cable tests that a fleetctl or the leader waits for, by group, and the agents' reports about them.
FABRIC_TEST_PREFIX = f"{ROOT}/fabrictest/"
FABRIC_RANK_PREFIX = f"{ROOT}/fabricrank/"
# The objects that one source of manifests has applied, by the name of the set.
APPLY_SET_PREFIX = f"{ROOT}/applyset/"
# The commits that hub models are pinned to, by deployment.
SNAPSHOT_PREFIX = f"{ROOT}/snapshot/"
# Nodes that fetch a hub's model before they get a replica of it.
PRELOAD_PREFIX = f"{ROOT}/preload/"
# The leader's orders for agents to sleep, and to wake other Macs; and the hours of the week in which models are used.
POWER_ORDER_PREFIX = f"{ROOT}/power/"
DEMAND_WEEK_PREFIX = f"{ROOT}/demandweek/"
# The models whose files an agent gives to others, and its places in the queues for hubs, below its node's name.
SHARE_PREFIX = f"{ROOT}/share/"
# The right to read an agent's or a gateway's logs, under a short lease.
TICKET_PREFIX = f"{ROOT}/ticket/"
EVENT_PREFIX = f"{ROOT}/event/"
# Who wrote what and why: one record for each transaction of users, in that transaction; in order of time.
CHANGE_PREFIX = f"{ROOT}/change/"
ELECTION_PREFIX = f"{ROOT}/election/"
ELECTION_RECONCILER = f"{ELECTION_PREFIX}reconciler"
# Which gateway holds a floating address, by address.
FLOATING_ADDRESS_PREFIX = f"{ELECTION_PREFIX}floatingaddress/"
# The fleet's authorities and TLS mode, issued and revoked certificates (schemas/trust.py). Every process reads them.
TRUST_PREFIX = f"{ROOT}/trust/"
FLEET_TRUST = f"{TRUST_PREFIX}fleet"
ISSUED_PREFIX = f"{TRUST_PREFIX}issued/"
REVOKED_PREFIX = f"{TRUST_PREFIX}revoked/"
REFUSED_PREFIX = f"{TRUST_PREFIX}refused/"
# Requests for certificates, each below the role and name that asks.
REQUEST_PREFIX = f"{ROOT}/csr/"
# Requests of Macs without a token, which a signer writes, and the answers of administrators to them.
JOIN_REQUEST_PREFIX = f"{ROOT}/joinrequest/"
JOIN_DECISION_PREFIX = f"{ROOT}/joindecision/"
# Exists while `fleetctl restore` writes, and after a restore that was interrupted.
RESTORING = f"{ROOT}/restoring"
# Gateways read the hashes of API keys and the keys of external servers, reconcilers the tokens of hubs, an agent those that it fetches with now.
SECRET_PREFIX = f"{ROOT}/secret/"
API_KEY_PREFIX = f"{SECRET_PREFIX}ApiKey/"
EXTERNAL_KEY_PREFIX = f"{SECRET_PREFIX}ExternalKey/"
JOIN_TOKEN_PREFIX = f"{SECRET_PREFIX}JoinToken/"
HUB_TOKEN_PREFIX = f"{SECRET_PREFIX}HubToken/"
# Copies of tokens for the nodes that fetch with them, while they do.
HUB_GRANT_PREFIX = f"{SECRET_PREFIX}HubGrant/"
# The secrets that the ranks of an epoch share, for the nodes of its ranks.
EPOCH_SECRET_PREFIX = f"{SECRET_PREFIX}GroupEpoch/"
# Keys that describe the present moment, most of them under a lease, and secrets in clear: backups leave them out.
TRANSIENT_PREFIXES = (
    *(LEASE_PREFIX, ENDPOINT_PREFIX, LOAD_PREFIX, EVENT_PREFIX, ELECTION_PREFIX),
    *(FABRIC_TEST_PREFIX, FABRIC_RANK_PREFIX, TICKET_PREFIX, SHARE_PREFIX),
    *(POWER_ORDER_PREFIX, DEMAND_WEEK_PREFIX),
    *(PRELOAD_PREFIX, ASSIGNMENT_PREFIX, ASSIGNMENTS_KEPT, MODEL_USE_PREFIX, MODEL_USES_KEPT),
    *(JOIN_TOKEN_PREFIX, JOIN_REQUEST_PREFIX, JOIN_DECISION_PREFIX),
    *(REQUEST_PREFIX, REFUSED_PREFIX),
    *(HUB_TOKEN_PREFIX, HUB_GRANT_PREFIX, EXTERNAL_KEY_PREFIX, EPOCH_SECRET_PREFIX),
)


def spec_prefix(kind: str) -> str:
    return f"{SPEC_PREFIX}{kind}/"


def spec_key(kind: str, name: str) -> str:
    return f"{SPEC_PREFIX}{kind}/{name}"


def status_prefix(kind: str) -> str:
    return f"{STATUS_PREFIX}{kind}/"


def status_key(kind: str, name: str) -> str:
    return f"{STATUS_PREFIX}{kind}/{name}"


def rank_prefix(node: str) -> str:
    """Return the prefix of the reports of the node's agent."""
    return f"{RANK_PREFIX}{node}/"


def rank_key(node: str, replica: str, rank: int) -> str:
    """Return the key of an agent's report about one rank.

    Reports have a prefix beside status/, so that an informer of a kind's statuses sees one type of document.
    """
    return f"{rank_prefix(node)}{replica}/{rank}"


def node_lease_key(node: str) -> str:
    return f"{NODE_LEASE_PREFIX}{node}"


def node_life_key(node: str) -> str:
    return f"{NODE_LIFE_PREFIX}{node}"


def load_key(node: str) -> str:
    return f"{LOAD_PREFIX}{node}"


def endpoint_prefix(node: str) -> str:
    """Return the prefix of the endpoints on the node."""
    return f"{ENDPOINT_PREFIX}{node}/"


def endpoint_key(node: str, replica: str) -> str:
    return f"{endpoint_prefix(node)}{replica}"


def assignment_prefix(node: str) -> str:
    """Return the prefix of the copies of Replicas that concern the node."""
    return f"{ASSIGNMENT_PREFIX}{node}/"


def assignment_key(node: str, replica: str) -> str:
    return f"{assignment_prefix(node)}{replica}"


def fabric_rank_prefix(node: str) -> str:
    """Return the prefix of the node's reports about cable tests."""
    return f"{FABRIC_RANK_PREFIX}{node}/"


def fabric_rank_key(node: str, group: str) -> str:
    return f"{fabric_rank_prefix(node)}{group}"


def share_prefix(node: str) -> str:
    """Return the prefix of what the node says about the files that it gives and fetches."""
    return f"{SHARE_PREFIX}{node}/"


def model_offer_key(node: str, folder: str) -> str:
    """Return the key that says that the node gives the files of a model."""
    return f"{share_prefix(node)}have/{folder}"


def fetch_claim_key(node: str, digest: str) -> str:
    """Return the key of the node's place in the queue for the hub, for one file."""
    return f"{share_prefix(node)}fetch/{digest}"


def share_parts(key: str) -> tuple[str, str, str]:
    """Return node, `have` or `fetch`, and the model's folder or the file's digest; empty for other keys."""
    node, _, rest = key.removeprefix(SHARE_PREFIX).partition("/")
    what, _, name = rest.partition("/")
    return node, what, name


def preload_prefix(node: str) -> str:
    """Return the prefix of the models that the node fetches without a replica."""
    return f"{PRELOAD_PREFIX}{node}/"


def preload_key(node: str, deployment: str) -> str:
    return f"{preload_prefix(node)}{deployment}"


def power_order_prefix(node: str) -> str:
    """Return the prefix of the leader's order for the node."""
    return f"{POWER_ORDER_PREFIX}{node}/"


def power_order_key(node: str) -> str:
    return f"{power_order_prefix(node)}order"


def node_of_power_order(key: str) -> str:
    """Return the node of an order's key."""
    return key.removeprefix(POWER_ORDER_PREFIX).partition("/")[0]


def ticket_prefix(holder: str) -> str:
    """Return the prefix of the tickets for one process: `Node/<name>`, `Gateway/<id>`, `Reconciler/<id>` or `Dashboard/<id>`."""
    return f"{TICKET_PREFIX}{holder}/"


def ticket_key(holder: str, ticket: str) -> str:
    return f"{ticket_prefix(holder)}{ticket}"


def hub_grant_prefix(node: str) -> str:
    """Return the prefix of the tokens that the node may fetch with now."""
    return f"{HUB_GRANT_PREFIX}{node}/"


def hub_grant_key(node: str, deployment: str) -> str:
    return f"{hub_grant_prefix(node)}{deployment}"


def epoch_secret_prefix(node: str) -> str:
    """Return the prefix of the secrets of groups that the node has a rank of."""
    return f"{EPOCH_SECRET_PREFIX}{node}/"


def epoch_secret_key(node: str, replica: str) -> str:
    return f"{epoch_secret_prefix(node)}{replica}"


def named(prefix: str, name: str) -> str:
    """Return the key of a name below a prefix whose keys are names: API keys, gateways, cable tests, apply sets."""
    return f"{prefix}{name}"


def issued_key(role: str, name: str) -> str:
    """Return the key of an identity's current certificate."""
    return f"{ISSUED_PREFIX}{role}/{name}"


def refused_key(role: str, name: str) -> str:
    """Return the key of the refusal of an identity's last request."""
    return f"{REFUSED_PREFIX}{role}/{name}"


def role_and_name(prefix: str, key: str) -> tuple[str, str]:
    """Return role and name of a key below `csr/`, `trust/issued/` or `trust/refused/`; both may be empty."""
    role, _, name = key.removeprefix(prefix).partition("/")
    return role, name


def request_prefix(role: str) -> str:
    return f"{REQUEST_PREFIX}{role}/"


def request_key(role: str, name: str) -> str:
    """Return the key of an identity's request for its next certificate."""
    return f"{request_prefix(role)}{name}"


def replica_of(key: str) -> str:
    """Return the replica of a rank's report or an endpoint; empty for other keys."""
    for prefix in (RANK_PREFIX, ENDPOINT_PREFIX):
        if key.startswith(prefix):
            _, _, rest = key.removeprefix(prefix).partition("/")
            return rest.partition("/")[0]
    return ""


def event_prefix(source: str) -> str:
    """Return the prefix of the events from a source: `reconciler`, or `Node/<name>`."""
    return f"{EVENT_PREFIX}{source}/"


def event_key(source: str, name: str) -> str:
    return f"{event_prefix(source)}{name}"


def change_key(time_ms: int, suffix: str) -> str:
    """Return the key of a record of a change; keys are in order of their times."""
    return f"{CHANGE_PREFIX}{time_ms:015d}-{suffix}"


def change_time_ms(key: str) -> int:
    """Return the time in a record's key; 0 for another key."""
    digits = key.removeprefix(CHANGE_PREFIX).partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def kind_and_name(key: str) -> tuple[str, str]:
    """Return kind and name (with any suffix) of a key below spec/, status/ and the like.

    Raises:
        ValueError: the key is not of that form.

    """
    _, _, rest = key.removeprefix(f"{ROOT}/").partition("/")
    kind, slash, name = rest.partition("/")
    if not (key.startswith(f"{ROOT}/") and slash and kind and name):
        raise ValueError(f"{key} is not the key of an object")
    return kind, name


def prefix_end(prefix: str) -> str:
    """Return the first key after all keys that begin with `prefix`."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
