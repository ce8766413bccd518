"""The fleet's API keys as this gateway knows them: from a key that somebody shows to who holds it. No I/O.

Keys are never kept: what a client shows is hashed for each request (under 1 us), looked up by its hash, and the
hashes are compared in constant time. So there is nothing that a revocation would have to be told to.
"""

import hashlib
import hmac
from collections.abc import Iterator, Mapping

from gateway.access.holder import Holder
from gateway.asks import RawHeaders
from machinery.clock import Clock
from machinery.promtext import head, labelled
from schemas.apikey import ApiKey


class Keyring:
    """Who holds which key."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_digest: dict[bytes, Holder] = {}
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
        before, found = self._by_digest, dict[bytes, Holder]()
        for key in keys.values():
            digest = bytes.fromhex(key.hash)
            holder = before.get(digest)
            # Deleted and made anew it is another key; the same one edited keeps what it used up.
            if holder is None or holder.name != key.name:
                holder = Holder(key, share, now_s)
            else:
                holder.renew(key, share, now_s)
            found[digest] = holder
        self._by_digest = found
        self.is_known = True

    def find(self, key: bytes) -> Holder | None:
        """Return who holds the key; None if nobody does."""
        digest = hashlib.sha256(key).digest()
        holder = self._by_digest.get(digest)
        if holder is None or not hmac.compare_digest(holder.digest, digest):
            return None
        return holder

    def lines(self) -> Iterator[str]:
        """Yield what each key has used, in Prometheus' text."""
        holders = sorted(self._by_digest.values(), key=lambda holder: holder.name)
        for name, help_, attribute in _FIGURES:
            yield from head(name, help_, "gauge" if attribute == "in_flight" else "counter")
            for holder in holders:
                yield f"{name}{labelled(('key',), (holder.name,))} {getattr(holder, attribute)}"


_FIGURES = (
    ("fleet_gateway_key_requests_total", "Requests let in, by API key.", "requests_used"),
    ("fleet_gateway_key_tokens_total", "Tokens of prompts and answers, by API key.", "tokens_used"),
    ("fleet_gateway_key_in_flight", "Requests under way, by API key.", "in_flight"),
)


def shown_key(headers: RawHeaders) -> bytes:
    """Return the key that the client shows; empty if it shows none. The first of several counts."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if key and scheme.lower() == b"bearer":
                return key.strip()
        elif name in (b"x-api-key", b"api-key") and value:
            return value
    return b""


def is_bare(headers: RawHeaders) -> bool:
    """Return whether `authorization` has something, but not in the form of `Bearer KEY`."""
    return any(
        name == b"authorization" and value.partition(b" ")[0].lower() not in (b"", b"bearer")
        for name, value in headers
    )
