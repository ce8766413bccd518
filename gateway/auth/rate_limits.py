"""Rate limits: token buckets, the limits of one key, client or model, and the headers that describe them.

Everything here is in the memory of one gateway: a restart forgets it. Buckets hold one minute at most.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

from gateway import errors
from gateway.routing.table import ServedModel
from machinery.clock import Clock
from machinery.connection_limits import client_network
from schemas.routing import RateLimit
from schemas.wire import headers as wire_headers
from schemas.wire.errors import Refusal

Headers: TypeAlias = list[tuple[bytes, bytes]]
LimitKind: TypeAlias = Literal["", "anonymous_", "model_"]
"""Prefix of the reason of a refusal in metrics: a key's limit, that of a client without a key, or a model's."""

MAX_CLIENTS = 4096
"""Addresses whose limits are kept. Each takes under 1 KiB."""
# Entries of a full table that a new address looks at for one to replace.
_LOOKS = 8
_REQUESTS, _TOKENS, _ANTHROPIC_REQUESTS, _ANTHROPIC_TOKENS = (
    tuple(name.encode() for name in names)
    for names in (
        wire_headers.RATE_LIMIT_REQUESTS,
        wire_headers.RATE_LIMIT_TOKENS,
        wire_headers.ANTHROPIC_RATE_LIMIT_REQUESTS,
        wire_headers.ANTHROPIC_RATE_LIMIT_TOKENS,
    )
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


class RateStatus(NamedTuple):
    """State of one limit, as its headers show it."""

    limit: int
    remaining: int
    reset_s: float
    """Seconds until all of the limit is available again."""


class Rates(NamedTuple):
    """The limits that a client reaches next; None where there is no limit."""

    requests: RateStatus | None
    tokens: RateStatus | None
    clock: Clock
    """Tells the time, for headers that show the time of a reset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits that this gateway grants; None: no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrency: int | None = None

    def share(self, part: float) -> "Limits":
        """Return the limits with a part of their rates, 0..1; concurrency applies to each gateway."""
        return Limits(
            requests_per_minute=_part(self.requests_per_minute, part),
            tokens_per_minute=_part(self.tokens_per_minute, part),
            concurrency=self.concurrency,
        )


def _part(rate: float | None, part: float) -> float | None:
    return None if rate is None else rate * part


class RateLimiter:
    """Limits and usage of one key, client or model. `check` then `enter` a request; `leave` must follow.

    Of a key without limits the handler changes the counts itself, which is all that both would do.
    """

    __slots__ = (
        "concurrency",
        "in_flight",
        "is_limited",
        "kind",
        "object",
        "requests",
        "requests_used",
        "subject",
        "tokens",
        "tokens_used",
    )

    def __init__(
        self, subject: str, limits: Limits, now_s: float, *, of: str = "", kind: LimitKind = ""
    ) -> None:
        """`subject`: the limited party, for messages; `of`: what it may use only so often, such as " for 'm'"."""
        self.subject, self.object, self.kind = subject, of, kind
        self.in_flight = 0
        self.requests_used = 0
        """Since the gateway started."""
        self.tokens_used = 0
        """Prompt and output tokens since the gateway started."""
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.renew(limits, now_s)

    def renew(self, limits: Limits, now_s: float) -> None:
        """Apply the current limits; what was used stays used."""
        self.concurrency = limits.concurrency
        self.requests = _bucket(self.requests, limits.requests_per_minute, now_s)
        self.tokens = _bucket(self.tokens, limits.tokens_per_minute, now_s)
        self.is_limited = not (
            self.concurrency is None and self.requests is None and self.tokens is None
        )

    def check(self, now_s: float) -> tuple[str, Refusal] | None:
        """Return the reason and the refusal if a request is over a limit now; charge nothing."""
        who, of, tokens, requests = self.subject, self.object, self.tokens, self.requests
        if self.concurrency is not None and self.in_flight >= self.concurrency:
            return "concurrency", errors.too_many_at_once(who, of, self.in_flight)
        if tokens is not None and tokens.level(now_s) <= 0:
            wait_s = tokens.wait_s(1.0)
            return "tokens", errors.too_many_tokens(who, of, tokens.capacity, wait_s)
        if requests is not None and requests.level(now_s) < 1:
            wait_s = requests.wait_s(1.0)
            return "requests", errors.too_many_requests(who, of, requests.capacity, wait_s)
        return None

    def enter(self) -> None:
        """Count and charge a request."""
        self.in_flight += 1
        self.requests_used += 1
        if self.requests is not None:
            self.requests.take(1)

    def leave(self, tokens: int, clock: Clock) -> None:
        """Release the request's slot and charge its tokens, whose number is known only now."""
        self.in_flight -= 1
        self.tokens_used += tokens
        if self.tokens is not None and tokens:
            self.tokens.level(clock.monotonic())
            self.tokens.take(tokens)

    def is_unused(self, now_s: float) -> bool:
        """Return whether a new limiter would be the same: nothing runs, and all of each limit is available."""
        return not self.in_flight and all(
            bucket is None or bucket.level(now_s) >= bucket.capacity
            for bucket in (self.requests, self.tokens)
        )


def _bucket(
    before: TokenBucket | None, per_minute: float | None, now_s: float
) -> TokenBucket | None:
    if per_minute is None:
        return None
    if before is None:
        return TokenBucket(per_minute, now_s)
    before.resize(per_minute, now_s)
    return before


def rates_of(limiters: Sequence[RateLimiter], clock: Clock) -> Rates:
    """Return, of several limits that a request is under, the one with the least remaining."""
    now_s = clock.monotonic()
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    for limiter in limiters:
        requests = _lower(requests, limiter.requests, now_s)
        tokens = _lower(tokens, limiter.tokens, now_s)
    return Rates(_status(requests, now_s), _status(tokens, now_s), clock)


def _lower(one: TokenBucket | None, other: TokenBucket | None, now_s: float) -> TokenBucket | None:
    if one is None or other is None:
        return one or other
    return one if one.level(now_s) <= other.level(now_s) else other


def _status(bucket: TokenBucket | None, now_s: float) -> RateStatus | None:
    if bucket is None:
        return None
    remaining = max(0, int(bucket.level(now_s)))
    return RateStatus(int(bucket.capacity), remaining, bucket.full_s())


def openai_headers(rates: Rates) -> Headers:
    """Return OpenAI's headers; limits that are not set are left out."""
    headers: Headers = []
    for names, status in ((_REQUESTS, rates.requests), (_TOKENS, rates.tokens)):
        if status is not None:
            headers += _headers(names, status, wire_headers.format_reset(status.reset_s))
    return headers


def anthropic_headers(rates: Rates) -> Headers:
    """Return Anthropic's headers, whose resets are times."""
    headers: Headers = []
    now = rates.clock.now()
    for names, status in (
        (_ANTHROPIC_REQUESTS, rates.requests),
        (_ANTHROPIC_TOKENS, rates.tokens),
    ):
        if status is not None:
            at = now + timedelta(seconds=status.reset_s, microseconds=999_999)
            headers += _headers(names, status, f"{at:%Y-%m-%dT%H:%M:%SZ}")
    return headers


def _headers(names: tuple[bytes, ...], status: RateStatus, reset: str) -> Headers:
    limit, remaining, reset_name = names
    return [
        (limit, b"%d" % status.limit),
        (remaining, b"%d" % status.remaining),
        (reset_name, reset.encode()),
    ]


class AnonymousClients:
    """Limits of clients without a key, by address; of IPv6 by /64.

    The table is bounded. Entries are dropped only when they are as good as new, so a client cannot get rid of a debt
    by making others push it out. While the table is full, all further addresses share one entry.
    """

    def __init__(self, limits: Limits, clock: Clock, *, max_clients: int = MAX_CLIENTS) -> None:
        self._limits = limits
        self._clock = clock
        self._max_clients = max_clients
        # A dict is slow to iterate after its first entries were deleted.
        self._by_address = OrderedDict[str, RateLimiter]()
        self._others: RateLimiter | None = None

    def __len__(self) -> int:
        """Return the number of addresses in the table."""
        return len(self._by_address)

    def of(self, host: str) -> RateLimiter:
        """Return the limits of an address."""
        rate_limiter = self._by_address.get(host)
        if rate_limiter is not None:
            return rate_limiter
        address = client_network(host)
        return self._by_address.get(address) or self._new(address)

    def _new(self, address: str) -> RateLimiter:
        now_s = self._clock.monotonic()
        if len(self._by_address) >= self._max_clients and not self._make_room(now_s):
            if self._others is None:
                self._others = self._limiter("All further addresses without an API key", now_s)
            return self._others
        rate_limiter = self._by_address[address] = self._limiter(f"The address {address}", now_s)
        return rate_limiter

    def _make_room(self, now_s: float) -> bool:
        """Drop an entry that is as good as new; look at a few at a time, in turn, so that no request waits."""
        for address in tuple(islice(self._by_address, _LOOKS)):
            if self._by_address[address].is_unused(now_s):
                del self._by_address[address]
                return True
            self._by_address.move_to_end(address)
        return False

    def _limiter(self, subject: str, now_s: float) -> RateLimiter:
        return RateLimiter(subject, self._limits, now_s, kind="anonymous_")


class ModelRates:
    """Rate limits of models (`spec.routing.rateLimit`), which all callers share; by the object that declares them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._gateways = 1
        self._found: dict[str, tuple[RateLimit, RateLimiter]] = {}

    def share(self, gateways: int) -> None:
        """Set the number of gateways that share the rates."""
        gateways = max(1, gateways)
        if gateways != self._gateways:
            self._gateways = gateways
            for declared, limiter in self._found.values():
                limiter.renew(self._limits(declared), self._clock.monotonic())

    def of(self, model: ServedModel) -> RateLimiter | None:
        """Return the limits that all requests to the model share; None if there are none."""
        declared = model.routing.rate_limit
        if declared is None:
            return None
        known = self._found.get(model.routing_source)
        if known is not None and known[0] is declared:
            return known[1]
        now_s = self._clock.monotonic()
        if known is None:
            subject = f"The model '{model.name}'"
            limiter = RateLimiter(subject, self._limits(declared), now_s, kind="model_")
        else:
            limiter = known[1]
            limiter.renew(self._limits(declared), now_s)
        self._found[model.routing_source] = (declared, limiter)
        return limiter

    def update(self, models: Mapping[str, ServedModel]) -> None:
        """Drop the limits of models that are gone or have none any more."""
        declared = {
            model.routing_source
            for model in models.values()
            if model.routing.rate_limit is not None
        }
        for source in set(self._found) - declared:
            del self._found[source]

    def _limits(self, declared: RateLimit) -> Limits:
        return Limits(
            requests_per_minute=declared.requests_per_minute,
            tokens_per_minute=declared.tokens_per_minute,
        ).share(1.0 / self._gateways)
