"""Idempotency keys: a request that is sent again gets the first answer, and two at a time become one.

Kept in the memory of one gateway process, within bounds. A stream is not kept: while it runs its key is taken, and
afterwards a repetition runs anew. So does one whose first attempt failed.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from gateway import errors
from machinery.clock import Clock
from schemas.wire.errors import RefusedError

if TYPE_CHECKING:  # it holds an answer's place
    from gateway.http.request_context import RequestContext

HEADER: Final = b"idempotency-key"
REPLAYED: Final = b"idempotency-replayed: true\r\n"
MAX_KEY: Final = 255
KEPT_S: Final = 3600.0
MAX_ENTRIES: Final = 10_000
MAX_BYTES: Final = 64 << 20
MAX_ANSWER: Final = 1 << 20

Scope: TypeAlias = tuple[str, str, bytes]
"""Identity of the API key, path and idempotency key."""


@dataclass(slots=True, eq=False)
class KeptAnswer:
    """The state of one key: taken by a running request, or answered."""

    scope: Scope
    fingerprint: bytes
    until_s: float
    status: int = 0
    """0 while the request runs."""
    head: bytes = b""
    body: bytes = b""


class IdempotencyTable:
    """The keys of one gateway process."""

    def __init__(
        self, clock: Clock, *, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._clock = clock
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[Scope, KeptAnswer] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        """Return the number of keys that are known."""
        return len(self._entries)

    def begin(self, principal: str, path: str, key: bytes, body: bytes) -> KeptAnswer:
        """Take the key, or return its answer (status other than 0). The holder must `complete` or `forget` it.

        Raises:
            RefusedError: the key is too long, belongs to another body, or a request with it is running.

        """
        if not 0 < len(key) <= MAX_KEY:
            raise RefusedError(errors.wrong_idempotency_key(MAX_KEY))
        scope, now_s = (principal, path, key), self._clock.monotonic()
        fingerprint = hashlib.blake2b(body, digest_size=16).digest()
        entry = self._entries.get(scope)
        if entry is not None and entry.status and entry.until_s <= now_s:
            self.forget(entry)
            entry = None
        if entry is not None:
            if entry.fingerprint != fingerprint:
                raise RefusedError(errors.idempotency_key_reused())
            if not entry.status:
                raise RefusedError(errors.idempotency_key_in_use())
            return entry
        taken = KeptAnswer(scope, fingerprint, now_s + KEPT_S)
        self._entries[scope] = taken
        self._make_room()
        return taken

    def replay(self, context: "RequestContext", key: bytes) -> bool:
        """Send the answer to the key, if there is one; else give the key to the request.

        Raises:
            RefusedError: as `begin`.

        """
        http_request, principal = context.http_request, context.principal
        owner = "" if principal is None else principal.identity
        answer = self.begin(owner, http_request.path, key, http_request.body)
        if not answer.status:
            context.kept_answer = answer
            return False
        context.response.whole(answer.status, answer.head + REPLAYED, answer.body)
        return True

    def complete(self, entry: KeptAnswer, status: int, head: bytes, body: bytes) -> None:
        """Keep the answer of a request. Answers that a repetition might better are not kept, nor are large ones."""
        if self._entries.get(entry.scope) is not entry:
            return
        if status >= 500 or status in (408, 409, 425, 429) or len(body) > MAX_ANSWER:
            self.forget(entry)
            return
        entry.status, entry.head, entry.body = status, head, body
        entry.until_s = self._clock.monotonic() + KEPT_S
        self._bytes += len(body)
        self._entries.move_to_end(entry.scope)
        self._make_room()

    def forget(self, entry: KeptAnswer) -> None:
        """Free the key."""
        if self._entries.get(entry.scope) is entry:
            del self._entries[entry.scope]
            self._bytes -= len(entry.body)

    def end(self, entry: KeptAnswer) -> None:
        """Free the key of a request that ended without an answer to keep."""
        if not entry.status:
            self.forget(entry)

    def _make_room(self) -> None:
        """Forget the oldest answers beyond the bounds; keys of running requests stay."""
        for entry in tuple(self._entries.values()):
            if len(self._entries) <= self._max_entries and self._bytes <= self._max_bytes:
                return
            if entry.status:
                self.forget(entry)
