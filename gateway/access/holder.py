"""One API key as this gateway sees it: what it is good for, and what of it is used up. Sends nothing."""

import math
from datetime import datetime
from typing import TypeAlias

from gateway.access.bucket import Bucket
from schemas.apikey import ApiKey

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


class Holder:
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
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
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
            found += _told(_REQUESTS, self.requests, now_s)
        if self.tokens is not None:
            found += _told(_TOKENS, self.tokens, now_s)
        return found


def _bucket(
    before: Bucket | None, per_minute: int | None, share: float, now_s: float
) -> Bucket | None:
    if per_minute is None:
        return None
    if before is None:
        return Bucket(per_minute * share, now_s)
    before.resize(per_minute * share, now_s)
    return before


def _told(names: tuple[bytes, bytes, bytes], bucket: Bucket, now_s: float) -> Headers:
    left = bucket.level(now_s)
    limit, remaining, reset = names
    return [
        (limit, b"%d" % bucket.capacity),
        (remaining, b"%d" % left if left > 0 else b"0"),
        (reset, b"%ds" % math.ceil(bucket.full_s())),
    ]
