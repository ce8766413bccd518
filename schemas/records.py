"""Documents in the store that are no API objects: API keys, apply sets, leases of gateways and reconcilers, tickets."""

from datetime import datetime
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, SecretStr, StringConstraints, field_serializer, model_validator

from schemas.deployment import HubEndpoint, ServedName
from schemas.external import ServerUrl
from schemas.meta import NAME_PATTERN, ApiModel, ObjectName
from schemas.trust import TlsReport

API_KEY_MARKER = "sk-fleet-"
"""The first characters of every key, so that secret scanners recognise one."""


Role: TypeAlias = Literal["user", "viewer", "operator", "admin"]
ROLES: tuple[Role, ...] = ("user", "viewer", "operator", "admin")
"""Roles of API keys. Each includes the rights of those before it."""

MAX_PREVIOUS_SECRETS = 4
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Limit = Annotated[int, Field(ge=1)]


def role_includes(role: Role, needed: Role) -> bool:
    """Return whether a role has the rights of another."""
    return ROLES.index(role) >= ROLES.index(needed)


class PreviousSecret(ApiModel):
    """An earlier secret of a key that was rotated. It has the rights of the key and shares its limits."""

    hash: Hash
    expires: datetime
    """The end of the overlap: the secret is refused from this time on."""


class ModelLimits(ApiModel):
    """Limits of one key for one model name, below the limits of the key itself."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Prompt and output tokens together."""
    concurrency: Limit | None = None
    """The most requests in flight at once, at each gateway."""

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if self.requests_per_minute is self.tokens_per_minute is self.concurrency is None:
            raise ValueError(
                "limits nothing: set requestsPerMinute, tokensPerMinute or concurrency"
            )
        return self


class ApiKey(ApiModel):
    """One API key as it is stored: its hash, rights and limits. Only the owner has the key itself."""

    name: ObjectName
    hash: Hash
    """SHA-256 of the key. A key has 256 random bits, so a slow hash would add no protection."""
    created: datetime
    """Time at which the first secret was created; a rotation keeps it."""
    expires: datetime | None = None
    """The key is refused from this time on; None: never."""
    models: tuple[ServedName, ...] = ()
    """Model names it may request, as clients write them; empty: all."""
    role: Role = "user"
    """user: models. viewer: also reads the admin API. operator: also operates gateways. admin: everything."""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Prompt and output tokens together."""
    concurrency: Limit | None = None
    """The most requests in flight at once, at each gateway."""
    model_limits: dict[ServedName, ModelLimits] = Field(default_factory=dict, max_length=100)
    """Further limits by model name, as clients write it."""
    previous: Annotated[tuple[PreviousSecret, ...], Field(max_length=MAX_PREVIOUS_SECRETS)] = ()
    """Earlier secrets, newest first, while they overlap with the present one."""

    @model_validator(mode="after")
    def _limits_models_of_the_key(self) -> Self:
        if self.models and (strange := sorted(set(self.model_limits) - set(self.models))):
            raise ValueError(f"limits the model {strange[0]!r}, which the key may not use")
        return self


class HubToken(ApiModel):
    """A token for one hub. The store has it in clear, because it is sent to the hub."""

    name: ObjectName
    endpoint: HubEndpoint
    """The only address that it is sent to."""
    token: Annotated[SecretStr, Field(min_length=1, max_length=500)]
    created: datetime

    @field_serializer("token")
    def _reveal(self, token: SecretStr) -> str:
        return token.get_secret_value()


class ExternalKey(ApiModel):
    """The API key of an external server. The store has it in clear, because it is sent to that server."""

    name: ObjectName
    url: ServerUrl
    """The only server that it is sent to; the path does not count."""
    key: Annotated[SecretStr, Field(min_length=1, max_length=500)]
    created: datetime

    @field_serializer("key")
    def _reveal(self, key: SecretStr) -> str:
        return key.get_secret_value()


# The set of a GitSource is called `gitsource.` and its name, which may have 128 characters.
ApplySetName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=138)]


class ApplySetMember(ApiModel):
    """One object of a set."""

    kind: str
    name: ObjectName
    uid: str = ""
    """The uid of the object that was applied; a later object of the same name is not pruned."""


class ApplySet(ApiModel):
    """All objects applied under one name, by `fleetctl apply --applyset` or by a GitSource, for pruning."""

    name: ApplySetName
    manager: str
    """The field manager that applies it: `fleetctl`, or `gitsource/<name>`."""
    updated: datetime
    members: Annotated[tuple[ApplySetMember, ...], Field(max_length=20_000)] = ()
    """Its objects, by kind and name."""


class GatewayLease(ApiModel):
    """The value of a gateway's lease key. The gateway is alive while the key exists."""

    url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#@]+$", max_length=300)]
    """Base address of the gateway for the reconciler and fleetctl, such as http://10.0.0.5:4000."""
    version: str
    """The release of the gateway."""
    asks_for_keys: bool = True
    """True if it requires API keys. Only such gateways share the keys' rates."""
    has_store_password: bool = False
    """True if it was started with a password for the store."""
    insecure_flags: tuple[str, ...] = ()
    """Its flags that switch protection off, such as --insecure-http."""
    tls: TlsReport | None = None
    """Its identity and TLS mode; None if it has no certificate."""
    is_announced: bool = False
    """True if it announces itself on its local networks (mDNS)."""
    full_disk: Annotated[str, StringConstraints(max_length=1024)] = ""
    """Its state folder while the disk of that is almost full; empty otherwise."""


class ReconcilerLease(ApiModel):
    """The value of a reconciler's lease key, leading or not. The process is alive while the key exists."""

    identity: str
    """Host, process and release; the value of the election's key while it leads."""
    has_store_password: bool = False
    """True if it was started with a password for the store."""
    join_address: Annotated[str, StringConstraints(max_length=300)] = ""
    """Host and port at which Macs join through it; empty if it does not sign certificates."""
    url: Annotated[str, StringConstraints(max_length=300)] = ""
    """Base address of its health and metrics; empty while it does not listen."""
    tls: TlsReport | None = None
    """Its identity and TLS mode; None if it has no certificate."""


class DashboardLease(ApiModel):
    """The value of a dashboard's lease key. The process is alive while the key exists."""

    url: Annotated[str, StringConstraints(max_length=300)] = ""
    """Base address of its API and page; empty while it does not listen."""
    version: str
    """Its release."""
    asks_for_keys: bool = True
    """True if it requires API keys."""
    has_store_password: bool = False
    """True if it was started with a password for the store."""
    tls: TlsReport | None = None
    """Its identity and TLS mode; None if it has no certificate."""
    full_disk: Annotated[str, StringConstraints(max_length=1024)] = ""
    """Its state folder while the disk of that is almost full; empty otherwise."""


TICKET_TTL_S = 60
"""Lifetime of a ticket's lease in seconds unless it is renewed."""


class Ticket(ApiModel):
    """The right to read from one agent or gateway for a minute; the value of `ticket/<holder>/<id>`, under a lease.

    The ticket of a dashboard is the right to log in there once.

    Every process that may write to the store may have one.
    """

    hash: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the secret, which fleetctl sends to the agent itself only."""
    user: str = ""
    """The user that asks, for the agent's log: `anna@studio`."""
