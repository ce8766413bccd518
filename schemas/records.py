"""ApiKey: who may ask gateways for what, and how often. The key itself is known to its owner alone.

ApplySet: what one source of manifests has applied, so that what it says no more can be pruned.

GatewayLease: that a gateway is there, and where its figures are read.

Ticket: the right to read something of one agent or gateway for a minute; who may write to the store may have one.
"""

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from schemas.deployment import ServedName
from schemas.meta import NAME_PATTERN, ApiModel, ObjectName

API_KEY_MARKER = "sk-fleet-"
"""What every key begins with, so that scanners of repositories recognise one."""


class ApiKey(ApiModel):
    """One key as it is stored: its hash, and what it is good for."""

    name: ObjectName
    hash: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the key. A key has 256 random bits, so that a slow hash would protect nothing more."""
    created: datetime
    expires: datetime | None = None
    """From when on it is refused; None: never."""
    models: tuple[ServedName, ...] = ()
    """Names it may ask for, as clients write them; none: all."""
    is_admin: bool = False
    """Whether it may also read the admin API."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Prompt and answer together."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """How many requests may be under way at once, at each gateway."""


# That of a GitSource is its name, which may have 128 characters, behind `gitsource.`.
ApplySetName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=138)]


class ApplySetMember(ApiModel):
    """One object of a set."""

    kind: str
    name: ObjectName
    uid: str = ""
    """Which object of that name it was: a later one of the name is not the set's to prune."""


class ApplySet(ApiModel):
    """Everything that was applied under one name: by `fleetctl apply --applyset`, or by a GitSource."""

    name: ApplySetName
    manager: str
    """Who applies it: `fleetctl`, or `gitsource/<name>`."""
    updated: datetime
    members: Annotated[tuple[ApplySetMember, ...], Field(max_length=20_000)] = ()
    """What it holds, by kind and name."""


class GatewayLease(ApiModel):
    """The value of a gateway's lease key; that the key exists is the sign of life."""

    url: Annotated[str, StringConstraints(pattern=r"^http://[^\s/?#@]+$", max_length=300)]
    """Base address of the gateway for the reconciler, such as http://10.0.0.5:4000."""
    version: str
    """Which release it is."""
    asks_for_keys: bool = True
    """Whether it asks for API keys: only those that do share keys' rates. Releases before this did not say."""


TICKET_TTL_S = 60
"""How long a ticket's lease lives unless it is renewed."""


class Ticket(ApiModel):
    """What lies under `ticket/<holder>/<id>`, under a lease."""

    hash: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the secret, which only goes from fleetctl to the agent itself."""
    user: str = ""
    """Who asks, for the agent's log: `anna@studio`."""
