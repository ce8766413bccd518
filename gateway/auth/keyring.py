"""API keys as this gateway knows them: lookup, rights and usage.

Keys are not stored. The secret of each request is hashed (under 1 us) and looked up by its hash. A revocation therefore
has no cache to invalidate.
"""

import hashlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from operator import attrgetter
from typing import Literal

from gateway.auth.rate_limits import Limits, RateLimiter
from gateway.request import RawHeaders
from machinery.clock import Clock
from machinery.prometheus import Gauge
from schemas.records import ApiKey, ModelLimits, Role

_KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"api-key"})
_SALT_LABEL = b"mlx-fleet prefix cache\0"
_KEY_METRICS = (
    (
        "fleet_gateway_key_requests_total",
        "Admitted requests by API key.",
        attrgetter("limiter.requests_used"),
    ),
    (
        "fleet_gateway_key_tokens_total",
        "Prompt and output tokens by API key.",
        attrgetter("limiter.tokens_used"),
    ),
    (
        "fleet_gateway_key_in_flight",
        "Running requests by API key.",
        attrgetter("limiter.in_flight"),
    ),
    (
        "fleet_gateway_key_previous_secret_requests_total",
        "Requests with an earlier secret of a rotated API key.",
        attrgetter("previous_used"),
    ),
)


class Principal:
    """One API key with its limits and usage. The object lives as long as the key; `renew` updates it."""

    __slots__ = (
        "by_model",
        "cache_salt",
        "created",
        "identity",
        "limiter",
        "models",
        "name",
        "previous_used",
        "role",
    )

    def __init__(self, key: ApiKey, part: float, now_s: float) -> None:
        self.name = key.name
        self.created = key.created
        self.identity = f"{key.name} {key.created.isoformat()}"
        """The owner of what clients keep here: a deleted and recreated key is another one."""
        self.limiter = RateLimiter(f"The API key '{key.name}'", Limits(), now_s)
        self.by_model: dict[str, RateLimiter] = {}
        """Limits by model name; nearly always empty."""
        self.previous_used = 0
        """Requests with an earlier secret since the gateway started."""
        self.renew(key, part, now_s)

    def renew(self, key: ApiKey, part: float, now_s: float) -> None:
        """Apply the key's current settings. `part`: of its rates that this gateway grants, 0..1."""
        self.models: frozenset[str] = frozenset(key.models)
        """Models that the key may use; empty: all."""
        self.role: Role = key.role
        digest = hashlib.sha256(_SALT_LABEL + bytes.fromhex(key.hash))
        self.cache_salt = digest.hexdigest()[:32].encode()
        """The salt of cached prompts: equal at all gateways, and as secret as the hash of the current secret."""
        self.limiter.renew(_limits(key).share(part), now_s)
        limiters = dict[str, RateLimiter]()
        for model, declared in key.model_limits.items():
            limits, before = _limits(declared).share(part), self.by_model.get(model)
            if before is None:
                of = f" for the model '{model}'"
                before = RateLimiter(self.limiter.subject, limits, now_s, of=of)
            else:
                before.renew(limits, now_s)
            limiters[model] = before
        self.by_model = limiters

    def may_ask_for(self, model: str) -> bool:
        """Return whether the key may use the model."""
        return not self.models or model in self.models


def _limits(declared: ApiKey | ModelLimits) -> Limits:
    return Limits(
        requests_per_minute=declared.requests_per_minute,
        tokens_per_minute=declared.tokens_per_minute,
        concurrency=declared.concurrency,
    )


class KeySecret:
    """One secret by which a key is known: the present one, or an earlier one until its overlap ends."""

    __slots__ = ("digest", "expires", "is_previous", "principal", "replaced_until")

    def __init__(
        self, hash_: str, principal: Principal, expires: datetime | None, until: datetime | None
    ) -> None:
        """`expires`: the end of the key itself; `until`: the end of the overlap, None for the present secret."""
        self.digest = bytes.fromhex(hash_)
        self.principal = principal
        self.is_previous = until is not None
        is_replaced_first = until is not None and (expires is None or until < expires)
        self.expires = until if is_replaced_first else expires
        self.replaced_until = until if is_replaced_first else None
        """The end of the overlap if the secret ends by it, and not by the end of the key."""


class Keyring:
    """All API keys by the hashes of their secrets."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.by_digest: dict[bytes, KeySecret] = {}
        """All secrets by their SHA-256: what a lookup compares are hashes, so its time tells nothing of a secret."""
        self.is_known = False
        """True once the keys were read from the store or from the saved state."""

    def __bool__(self) -> bool:
        """Return whether the fleet has any key."""
        return bool(self.by_digest)

    def replace(self, keys: Mapping[str, ApiKey], gateways: int) -> None:
        """Replace the keys, given by name. `gateways`: the number of gateways that share their rates.

        Each gateway grants its share, as Envoy's local_cluster_rate_limit does. A shared counter
        would add a dependency to each request.
        """
        now_s, part = self._clock.monotonic(), 1.0 / max(1, gateways)
        before = {secret.principal.name: secret.principal for secret in self.by_digest.values()}
        secrets = dict[bytes, KeySecret]()
        for key in keys.values():
            principal = before.get(key.name)
            # A deleted and recreated key is a new one; an edited or rotated key keeps its usage.
            if principal is None or principal.created != key.created:
                principal = Principal(key, part, now_s)
            else:
                principal.renew(key, part, now_s)
            for old in key.previous:
                secret = KeySecret(old.hash, principal, key.expires, old.expires)
                secrets[secret.digest] = secret
            secret = KeySecret(key.hash, principal, key.expires, None)
            secrets[secret.digest] = secret
        self.by_digest = secrets
        self.is_known = True

    def secret(self, key: bytes) -> KeySecret | None:
        """Return what is known of a presented key; None if it is unknown. It may be expired."""
        return self.by_digest.get(hashlib.sha256(key).digest())

    def identities(self) -> frozenset[str]:
        """Return the identities of all keys, expired ones included."""
        return frozenset(secret.principal.identity for secret in self.by_digest.values())

    def owner(self, identity: str) -> Principal | None:
        """Return the principal of a key that exists and has not expired, by its identity."""
        now = self._clock.now()
        for secret in self.by_digest.values():
            is_valid = secret.expires is None or now < secret.expires
            if secret.principal.identity == identity and not secret.is_previous and is_valid:
                return secret.principal
        return None

    def find(self, key: bytes) -> Principal | None:
        """Return the principal of a presented key; None if it is unknown."""
        secret = self.secret(key)
        return None if secret is None else secret.principal

    def _principals(self) -> list[Principal]:
        principals = {secret.principal.name: secret.principal for secret in self.by_digest.values()}
        return [principals[name] for name in sorted(principals)]

    def lines(self) -> Iterator[str]:
        """Yield the usage of each key in Prometheus text format."""
        principals = self._principals()
        for name, help_, read in _KEY_METRICS:
            numbers = {principal.name: read(principal) for principal in principals}
            type_: Literal["counter", "gauge"] = "counter" if name.endswith("_total") else "gauge"
            yield from Gauge(name, help_, numbers.copy, type_, labels=("key",)).lines()


def presented_key(headers: RawHeaders) -> bytes:
    """Return the key that the client sent; empty if there is none. The first of several counts."""
    for name, value in headers:
        if name in _KEY_HEADERS and (key := _key_in(name, value)):
            return key
    return b""


def _key_in(name: bytes, value: bytes) -> bytes:
    """Return the key in a header that may have one; empty if it has none."""
    if name != b"authorization":
        return value
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def lacks_scheme(headers: RawHeaders) -> bool:
    """Return whether `authorization` is set but does not have the form `Bearer KEY`."""
    return any(
        name == b"authorization" and value.partition(b" ")[0].lower() not in (b"", b"bearer")
        for name, value in headers
    )
