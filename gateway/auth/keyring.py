"""API keys as this gateway knows them: lookup, limits and usage.

Keys are not stored. The key of each request is hashed (under 1 us), looked up by its hash and
compared in constant time. A revocation therefore has no cache to invalidate.
"""

import hashlib
import hmac
import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TypeAlias

from gateway.request import RawHeaders
from machinery.clock import Clock
from machinery.prometheus import family_header, format_labels
from schemas.records import ApiKey
from schemas.wire import headers as wire_headers

Headers: TypeAlias = list[tuple[bytes, bytes]]
_REQUESTS = tuple(name.encode() for name in wire_headers.RATE_LIMIT_REQUESTS)
_TOKENS = tuple(name.encode() for name in wire_headers.RATE_LIMIT_TOKENS)
_KEY_METRICS = (
    ("fleet_gateway_key_requests_total", "Admitted requests by API key.", "requests_used"),
    ("fleet_gateway_key_tokens_total", "Prompt and output tokens by API key.", "tokens_used"),
    ("fleet_gateway_key_in_flight", "Running requests by API key.", "in_flight"),
)


class TokenBucket:
    """A token bucket that may go into debt.

    The cost of a request in tokens is known only after it, so the level may be negative. No request
    is admitted until it is positive again. Over `t` seconds at most `capacity + per_minute / 60 *
    t` is admitted.
    """

    __slots__ = ("_at_s", "_level", "_per_minute", "capacity")

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.capacity = 0.0
        """At least 1: a share of a small rate still admits a request now and then."""
        self._level = math.inf
        self._at_s = now_s
        self.resize(per_minute, now_s)

    def resize(self, per_minute: float, now_s: float) -> None:
        """Change the rate; the level stays, up to the new capacity."""
        if self.capacity:
            self.level(now_s)
        self.capacity = max(1.0, per_minute)
        self._per_minute = per_minute
        self._level = min(self._level, self.capacity)

    def level(self, now_s: float) -> float:
        """Return the current level."""
        passed_s = now_s - self._at_s
        if passed_s > 0:
            self._at_s = now_s
            self._level = min(self.capacity, self._level + passed_s * self._per_minute / 60.0)
        return self._level

    def take(self, amount: float) -> None:
        """Take an amount, which may be more than the level."""
        self._level -= amount

    def wait_s(self, wanted: float) -> float:
        """Return the seconds until the level reaches an amount, counted from the last call of `level`."""
        return max(0.0, wanted - self._level) * 60.0 / self._per_minute

    def full_s(self) -> float:
        """Return the seconds until the bucket is full, counted from the last call of `level`."""
        return self.wait_s(self.capacity)


class Principal:
    """One API key with its limits and usage. The object lives as long as the key; `renew` updates it."""

    __slots__ = (
        "concurrency",
        "digest",
        "expires",
        "in_flight",
        "is_admin",
        "is_limited",
        "models",
        "name",
        "requests",
        "requests_used",
        "tokens",
        "tokens_used",
    )

    def __init__(self, key: ApiKey, backend: float, now_s: float) -> None:
        self.digest = bytes.fromhex(key.hash)
        self.name = key.name
        self.in_flight = 0
        self.requests_used = 0
        """Since the gateway started."""
        self.tokens_used = 0
        """Prompt and output tokens since the gateway started."""
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.renew(key, backend, now_s)

    def renew(self, key: ApiKey, backend: float, now_s: float) -> None:
        """Apply the key's current settings. `share`: the part of its rates that this gateway grants, 0..1."""
        self.expires: datetime | None = key.expires
        self.models: frozenset[str] = frozenset(key.models)
        """Models that the key may use; empty: all."""
        self.is_admin = key.is_admin
        self.concurrency = key.concurrency
        self.requests = _bucket(self.requests, key.requests_per_minute, backend, now_s)
        self.tokens = _bucket(self.tokens, key.tokens_per_minute, backend, now_s)
        self.is_limited = self.requests is not None or self.tokens is not None
        """True if the key has rates."""

    def may_ask_for(self, model: str) -> bool:
        """Return whether the key may use the model."""
        return not self.models or model in self.models

    def headers(self, now_s: float) -> Headers:
        """Return the state of the key's rates as OpenAI's headers; limits that are not set are left out."""
        found: Headers = []
        if self.requests is not None:
            found += _rate_headers(_REQUESTS, self.requests, now_s)
        if self.tokens is not None:
            found += _rate_headers(_TOKENS, self.tokens, now_s)
        return found


def _bucket(
    before: TokenBucket | None, per_minute: int | None, backend: float, now_s: float
) -> TokenBucket | None:
    if per_minute is None:
        return None
    if before is None:
        return TokenBucket(per_minute * backend, now_s)
    before.resize(per_minute * backend, now_s)
    return before


def _rate_headers(names: tuple[bytes, ...], bucket: TokenBucket, now_s: float) -> Headers:
    left = bucket.level(now_s)
    limit, remaining, reset = names
    return [
        (limit, b"%d" % bucket.capacity),
        (remaining, b"%d" % left if left > 0 else b"0"),
        (reset, b"%ds" % math.ceil(bucket.full_s())),
    ]


class Keyring:
    """All API keys by hash."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_digest: dict[bytes, Principal] = {}
        self.is_known = False
        """True once the keys were read from the store or from the saved state."""

    def __bool__(self) -> bool:
        """Return whether the fleet has any key."""
        return bool(self._by_digest)

    def replace(self, keys: Mapping[str, ApiKey], gateways: int) -> None:
        """Replace the keys, given by name. `gateways`: the number of gateways that share their rates.

        Each gateway grants its share, as Envoy's local_cluster_rate_limit does. A shared counter
        would add a dependency to each request.
        """
        now_s, backend = self._clock.monotonic(), 1.0 / max(1, gateways)
        before, found = self._by_digest, dict[bytes, Principal]()
        for key in keys.values():
            digest = bytes.fromhex(key.hash)
            principal = before.get(digest)
            # A deleted and recreated key is a new one; an edited key keeps its usage.
            if principal is None or principal.name != key.name:
                principal = Principal(key, backend, now_s)
            else:
                principal.renew(key, backend, now_s)
            found[digest] = principal
        self._by_digest = found
        self.is_known = True

    def find(self, key: bytes) -> Principal | None:
        """Return the principal of a key; None if the key is unknown."""
        digest = hashlib.sha256(key).digest()
        principal = self._by_digest.get(digest)
        if principal is None or not hmac.compare_digest(principal.digest, digest):
            return None
        return principal

    def lines(self) -> Iterator[str]:
        """Yield the usage of each key in Prometheus text format."""
        principals = sorted(self._by_digest.values(), key=lambda principal: principal.name)
        for name, help_, attribute in _KEY_METRICS:
            yield from family_header(
                name, help_, "gauge" if attribute == "in_flight" else "counter"
            )
            for principal in principals:
                labels = format_labels(("key",), (principal.name,))
                yield f"{name}{labels} {getattr(principal, attribute)}"


def presented_key(headers: RawHeaders) -> bytes:
    """Return the key that the client sent; empty if there is none. The first of several counts."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if key and scheme.lower() == b"bearer":
                return key.strip()
        elif name in (b"x-api-key", b"api-key") and value:
            return value
    return b""


def lacks_scheme(headers: RawHeaders) -> bool:
    """Return whether `authorization` is set but does not have the form `Bearer KEY`."""
    return any(
        name == b"authorization" and value.partition(b" ")[0].lower() not in (b"", b"bearer")
        for name, value in headers
    )
