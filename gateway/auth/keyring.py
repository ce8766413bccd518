"""A token bucket that may go into debt. Pure: the time arrives as an argument.

One API key as this gateway sees it: what it is good for, and what of it is used up. Sends nothing.

The fleet's API keys as this gateway knows them: from a key that somebody shows to who holds it. No I/O.

Keys are never kept: what a client shows is hashed for each request (under 1 us), looked up by its hash, and the
hashes are compared in constant time. So there is nothing that a revocation would have to be told to.
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


class TokenBucket:
    """So much a minute, all of it at once if nothing was taken for a minute.

    What is taken is known only afterwards where it is tokens, so the level may be below zero: then nothing
    may be taken until it has filled up again. Over any time of `t` seconds at most `capacity + per_minute / 60 * t`
    is begun to be taken.
    """

    __slots__ = ("_at_s", "_level", "_per_minute", "capacity")

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.capacity = 0.0
        """Never below 1: a share of a small number still lets a request through now and then."""
        self._level = math.inf
        self._at_s = now_s
        self.resize(per_minute, now_s)

    def resize(self, per_minute: float, now_s: float) -> None:
        """Fill it at another rate from now on; what is in it stays, as far as it has room."""
        if self.capacity:
            self.level(now_s)
        self.capacity = max(1.0, per_minute)
        self._per_minute = per_minute
        self._level = min(self._level, self.capacity)

    def level(self, now_s: float) -> float:
        """Return how much is in it now."""
        passed_s = now_s - self._at_s
        if passed_s > 0:
            self._at_s = now_s
            self._level = min(self.capacity, self._level + passed_s * self._per_minute / 60.0)
        return self._level

    def take(self, amount: float) -> None:
        """Take so much out of it, if need be more than there is."""
        self._level -= amount

    def wait_s(self, wanted: float) -> float:
        """Return after how long there will be that much, counted from when its level was asked for last."""
        return max(0.0, wanted - self._level) * 60.0 / self._per_minute

    def full_s(self) -> float:
        """Return after how long it will be full, counted as above."""
        return self.wait_s(self.capacity)


Headers: TypeAlias = list[tuple[bytes, bytes]]


_REQUESTS = (
    b"x-ratelimit-limit-requests",
    b"x-ratelimit-remaining-requests",
    b"x-ratelimit-reset-requests",
)
_TOKENS = (
    b"x-ratelimit-limit-tokens",
    b"x-ratelimit-remaining-tokens",
    b"x-ratelimit-reset-tokens",
)


class Principal:
    """Who holds a key. Stays the same object for as long as the key exists; `renew` brings it up to date."""

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

    def __init__(self, key: ApiKey, share: float, now_s: float) -> None:
        self.digest = bytes.fromhex(key.hash)
        self.name = key.name
        self.in_flight = 0
        self.requests_used = 0
        """Since the gateway started."""
        self.tokens_used = 0
        """As above, prompts and answers."""
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.renew(key, share, now_s)

    def renew(self, key: ApiKey, share: float, now_s: float) -> None:
        """Take over what the key says now; `share` is which part of its rates is this gateway's, 0..1."""
        self.expires: datetime | None = key.expires
        self.models: frozenset[str] = frozenset(key.models)
        """Names it may ask for; none: all."""
        self.is_admin = key.is_admin
        self.concurrency = key.concurrency
        self.requests = _bucket(self.requests, key.requests_per_minute, share, now_s)
        self.tokens = _bucket(self.tokens, key.tokens_per_minute, share, now_s)
        self.is_limited = self.requests is not None or self.tokens is not None
        """Whether it has rates."""

    def may_ask_for(self, model: str) -> bool:
        """Return whether its models include the name."""
        return not self.models or model in self.models

    def headers(self, now_s: float) -> Headers:
        """Return how its rates stand, in OpenAI's headers; nothing of what is not limited."""
        found: Headers = []
        if self.requests is not None:
            found += _rate_headers(_REQUESTS, self.requests, now_s)
        if self.tokens is not None:
            found += _rate_headers(_TOKENS, self.tokens, now_s)
        return found


def _bucket(
    before: TokenBucket | None, per_minute: int | None, share: float, now_s: float
) -> TokenBucket | None:
    if per_minute is None:
        return None
    if before is None:
        return TokenBucket(per_minute * share, now_s)
    before.resize(per_minute * share, now_s)
    return before


def _rate_headers(names: tuple[bytes, bytes, bytes], bucket: TokenBucket, now_s: float) -> Headers:
    left = bucket.level(now_s)
    limit, remaining, reset = names
    return [
        (limit, b"%d" % bucket.capacity),
        (remaining, b"%d" % left if left > 0 else b"0"),
        (reset, b"%ds" % math.ceil(bucket.full_s())),
    ]


class Keyring:
    """Who holds which key."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_digest: dict[bytes, Principal] = {}
        self.is_known = False
        """Whether the keys were read yet, from the store or from what was kept of it."""

    def __bool__(self) -> bool:
        """Return whether the fleet has any key."""
        return bool(self._by_digest)

    def replace(self, keys: Mapping[str, ApiKey], gateways: int) -> None:
        """Take over the keys there are, by name, and how many gateways share their rates.

        Each gateway grants its share (as Envoy's local_cluster_rate_limit): clients' connections are spread over
        gateways, and asking a common counter for each request would make one fail with it.
        """
        now_s, share = self._clock.monotonic(), 1.0 / max(1, gateways)
        before, found = self._by_digest, dict[bytes, Principal]()
        for key in keys.values():
            digest = bytes.fromhex(key.hash)
            holder = before.get(digest)
            # Deleted and made anew it is another key; the same one edited keeps what it used up.
            if holder is None or holder.name != key.name:
                holder = Principal(key, share, now_s)
            else:
                holder.renew(key, share, now_s)
            found[digest] = holder
        self._by_digest = found
        self.is_known = True

    def find(self, key: bytes) -> Principal | None:
        """Return who holds the key; None if nobody does."""
        digest = hashlib.sha256(key).digest()
        holder = self._by_digest.get(digest)
        if holder is None or not hmac.compare_digest(holder.digest, digest):
            return None
        return holder

    def lines(self) -> Iterator[str]:
        """Yield what each key has used, in Prometheus' text."""
        holders = sorted(self._by_digest.values(), key=lambda holder: holder.name)
        for name, help_, attribute in _KEY_METRICS:
            yield from family_header(
                name, help_, "gauge" if attribute == "in_flight" else "counter"
            )
            for holder in holders:
                yield f"{name}{format_labels(('key',), (holder.name,))} {getattr(holder, attribute)}"


_KEY_METRICS = (
    ("fleet_gateway_key_requests_total", "Requests let in, by API key.", "requests_used"),
    ("fleet_gateway_key_tokens_total", "Tokens of prompts and answers, by API key.", "tokens_used"),
    ("fleet_gateway_key_in_flight", "Requests under way, by API key.", "in_flight"),
)


def presented_key(headers: RawHeaders) -> bytes:
    """Return the key that the client shows; empty if it shows none. The first of several counts."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if key and scheme.lower() == b"bearer":
                return key.strip()
        elif name in (b"x-api-key", b"api-key") and value:
            return value
    return b""


def lacks_scheme(headers: RawHeaders) -> bool:
    """Return whether `authorization` has something, but not in the form of `Bearer KEY`."""
    return any(
        name == b"authorization" and value.partition(b" ")[0].lower() not in (b"", b"bearer")
        for name, value in headers
    )
