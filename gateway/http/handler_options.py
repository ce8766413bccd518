"""Options of the request handler, which the gateway's flags decide. Values only."""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.http.cors import AllowedHosts, AllowedOrigins
from gateway.http.limits import BodyMemory
from machinery.connection_limits import ConnectionLimiter
from schemas.wire.errors import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOptions:
    """Options that apply to every request."""

    max_body: int
    """In bytes."""
    body_memory: BodyMemory
    connections: ConnectionLimiter
    hosts: AllowedHosts
    origins: AllowedOrigins
    id_prefix: str
    """Prefix of generated request ids."""
    draw: Callable[[], float]
    """Returns a random number, 0..1."""
    count_mirrored: Callable[[str], None]
    """Counts copies of requests by outcome."""
    store_wait_s: float
    """The longest wait of a request for the first routing table, after the gateway has started."""
    store_wait_limit: int
    """The number of requests that may wait for it."""
    default_model: str = ""
    """Model of requests that name none; empty: the only one there is."""
    rename: Callable[[Refusal], Refusal] | None = None
    """Returns a refusal with the names that clients of an earlier system know; None: none is renamed."""
