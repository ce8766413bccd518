"""Names of the HTTP headers that our processes exchange, and the values that more than one of them parses.

Names are lower case, as ASGI and HTTP/2 have them. A process that works on bytes encodes a name once, at import.
"""

import math
from typing import Final

from schemas.wire import errors

# Sent by clients; the gateway passes them on to the engine.
REQUEST_ID: Final = "x-request-id"
REQUEST_TIMEOUT: Final = "x-request-timeout"
"""Seconds from the arrival of a request to the end of its answer. See `parse_timeout`."""
SESSION_ID: Final = "x-session-id"
TRACE_PARENT: Final = "traceparent"
TRACE_STATE: Final = "tracestate"

# Sent by gateways to engines.
RESUMABLE: Final = "x-fleet-resumable"
"""`1` asks for resume records (machinery/engine_link.py), which a link carries, and allows the body field `fleet`; `0` is the default."""

PROGRESS: Final = "x-fleet-progress"
"""Seconds after which a sign of progress is wanted on the link, again and again, while the engine makes progress and its
response has not begun."""

CACHE_SALT: Final = "x-fleet-cache-salt"
"""The salt of the sender's API key: prompts with different salts share no cached prefixes. The value is a digest that
only gateways can compute. A body's own `cache_salt` divides the cache of one key further."""

MODEL: Final = "x-fleet-model"
"""The name under which the engine serves the model of an upload, whose form has the name of a route."""

# Sent by engines; gateways weigh replicas by them.
NODE: Final = "x-fleet-node"
REPLICA: Final = "x-fleet-replica"
IN_FLIGHT: Final = "x-fleet-in-flight"
"""Sequences that hold a slot of the engine."""
QUEUED: Final = "x-fleet-queued"
"""Requests in the queue of the engine."""
MEMORY_FREE: Final = "x-fleet-memory-free"
"""Percent of the engine's memory limit that is free or can be freed, from 0 to 100."""
KV_USED: Final = "x-fleet-kv-used"
"""Millionths of the memory for KV caches that are promised to requests, from 0 to 1000000."""

CACHE_MISS: Final = "x-fleet-cache-miss"
"""Explanation of tokens that an engine read again although it had read them before (engine/cache/miss_explanation.py)."""

# Sent by gateways to clients, with NODE and REPLICA.
ATTEMPTS: Final = "x-fleet-attempts"
"""The number of engines that were tried."""
RESUMED: Final = "x-fleet-resumed"
"""The number of times that an answer continued on another engine; one that did not continue has none. Of a stream it is a
trailer, because it is known at the end only."""
CANONICAL: Final = "x-fleet-canonical"
"""The rules that made the request's prompt canonical (gateway/canonical_prompts.py), as `AGENT/RULE`, parted by commas."""
STORE: Final = "x-fleet-store"
"""`STORE_STALE` while the gateway has no connection to etcd and serves from its last table."""
STORE_STALE: Final = "stale"
GATEWAY: Final = "x-fleet-gateway"
"""The id of the gateway that answers on its admin port; the reconciler checks it."""
RETRY_AFTER: Final = "retry-after"

WARNING: Final = "warning"
"""Parameters of the request that were left out (RFC 9111 has retired the header for caches; servers still use it)."""

ENGINE_RESPONSE_HEADERS: Final = frozenset({"content-type", "cache-control", RETRY_AFTER, WARNING})
"""The headers of an engine's response that gateways pass on to clients. All others end at the gateway: an engine
must not be able to set cookies, allow origins or redirect."""

# OpenAI's rate limit headers, sent by gateways to clients under a limit. Resets are durations: see `format_reset`.
RATE_LIMIT_REQUESTS: Final = (
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
)
RATE_LIMIT_TOKENS: Final = (
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
)
# Anthropic's, sent on its API instead. Resets are times (RFC 3339).
ANTHROPIC_RATE_LIMIT_REQUESTS: Final = (
    "anthropic-ratelimit-requests-limit",
    "anthropic-ratelimit-requests-remaining",
    "anthropic-ratelimit-requests-reset",
)
ANTHROPIC_RATE_LIMIT_TOKENS: Final = (
    "anthropic-ratelimit-tokens-limit",
    "anthropic-ratelimit-tokens-remaining",
    "anthropic-ratelimit-tokens-reset",
)

MAX_TIMEOUT_S: Final = 86_400.0
"""The longest `x-request-timeout`: one day. A larger number is more likely milliseconds than a deadline."""


def format_warning(text: str) -> str:
    """Return the value of `warning`: code 299 is any lasting one. `text` has no quotes."""
    return f'299 mlx-fleet "{text}"'


def parse_timeout(text: str) -> float:
    """Return the value of `x-request-timeout` in seconds.

    Raises:
        RefusedError: the value is not a number above 0 and at most `MAX_TIMEOUT_S`.

    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise errors.invalid(
            f"The header '{REQUEST_TIMEOUT}' must be a number of seconds, above 0 and at most "
            f"{MAX_TIMEOUT_S:.0f}, such as 2.5; it is {text[:50]!r}.",
            param=REQUEST_TIMEOUT,
        )
    return seconds


def format_reset(seconds: float) -> str:
    """Return seconds in the format of OpenAI's resets, which is Go's: `20ms`, `1s`, `6m0s`. Rounded up."""
    if 0 < seconds < 1 and (thousandths := math.ceil(round(seconds * 1000, 3))) < 1000:
        return f"{thousandths}ms"
    whole = math.ceil(round(seconds, 3))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60}s"
    return f"{whole // 3600}h{whole // 60 % 60}m{whole % 60}s"
