"""The parts that both etcd adapters share: endpoint rotation, tokens, limits, and de-duplication of watch events."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from store.errors import (
    AuthOffError,
    PermissionDeniedError,
    StoreError,
    UnauthenticatedError,
    UnavailableError,
)
from store.etcd.address import EtcdAddress
from store.port import KeyChange, WatchBatch

T = TypeVar("T")
log = logging.getLogger(__name__)

CALL_S = 2.0
# A renewal is sent after a third of the lease's time. Within a lease of four seconds there must be time for it to fail
# on a frozen member, and on a second one.
RENEW_S = 1.0
# Shorter than a call, so that a call still has time for another endpoint.
CONNECT_S = 1.0
# Unary calls in flight at once; waiting for a slot does not count against a call's time.
AT_ONCE = 32
# Embedded etcd reports progress every 5 s. An external etcd may not: then an idle watch is opened again after this
# time, which costs one request.
IDLE_S = 17.0


class EndpointCaller:
    """Makes calls to the etcd at an address; a failing endpoint is followed by the next one.

    `authenticate` returns a token for the address's user; it makes one call to the current endpoint.
    """

    def __init__(self, address: EtcdAddress, authenticate: Callable[[], Awaitable[str]]) -> None:
        self._address = address
        self._authenticate = authenticate
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._token: str | None = None
        self._has_asked = False
        # etcd checks a password with bcrypt: 32 concurrent calls must not request 32 tokens.
        self._authenticating = asyncio.Lock()
        self.turn = 0

    def rotate(self, turn: int) -> None:
        """Switch to the next endpoint; several calls that fail at the same endpoint count as one failure."""
        if self.turn == turn:
            self.turn += 1

    async def call(
        self, exchange: Callable[[str | None], Awaitable[T]], *, limit_s: float = CALL_S
    ) -> T:
        """Run `exchange`, which makes one call to the current endpoint with a token; return its result.

        Raises:
            StoreError: the last one that `exchange` raised.

        """
        async with self._slots:
            for _ in self._address.endpoints[1:]:
                try:
                    return await self._ask(exchange, limit_s)
                except UnavailableError as error:
                    # Nothing was written, so the next endpoint may be tried, even for a write.
                    if error.ambiguous:
                        raise
            return await self._ask(exchange, limit_s)

    async def _ask(self, exchange: Callable[[str | None], Awaitable[T]], limit_s: float) -> T:
        """Call one endpoint; retry once with a fresh token if the token is stale."""
        token = await self.token(limit_s)
        try:
            return await exchange(token)
        except UnauthenticatedError as error:
            if not self._address.username:
                raise UnauthenticatedError(
                    f"etcd at {self._address} requires a user and a password, and got none ({error})"
                ) from error
        except PermissionDeniedError as error:
            raise PermissionDeniedError(
                f"etcd at {self._address} denies this to user {self._address.username!r}: {error}"
            ) from error
        self.discard_token(token)
        return await exchange(await self.token(limit_s))

    async def token(self, limit_s: float = CALL_S) -> str | None:
        """Return the token to call with; None without a user, or if etcd does not require one."""
        if not self._address.username:
            return None
        try:
            async with asyncio.timeout(limit_s), self._authenticating:
                if not self._has_asked:
                    self._token = await self._fresh_token()
                    self._has_asked = True
                return self._token
        except TimeoutError as error:
            raise UnavailableError(
                f"etcd at {self._address}: no answer to the password in {limit_s:g} s"
            ) from error

    async def _fresh_token(self) -> str | None:
        try:
            return await self._authenticate()
        except AuthOffError:
            # Processes get their passwords before etcd requires them: see `init-auth`. From then on a call
            # without a token is refused, and a token is requested.
            log.warning("etcd does not require passwords", extra={"etcd": str(self._address)})
            return None
        except UnavailableError as error:
            # No call was made, so nothing was written.
            raise UnavailableError(str(error)) from error
        except StoreError as error:
            raise PermissionDeniedError(
                f"etcd refuses user {self._address.username!r}: {error}"
            ) from error

    def discard_token(self, token: str | None) -> None:
        """Request a fresh token next time, if this one is still in use."""
        if self._token == token:
            self._has_asked = False


def drop_seen_changes(
    changes: tuple[KeyChange, ...], after_revision: int, store: str
) -> WatchBatch | None:
    """Return the changes after a revision, or None if there are none; `changes` are etcd's events in order.

    Watches are opened at the last revision seen, not at the next one, and the changes of that revision are
    dropped here. Older etcd (such as 3.4.23) accepts a watch at the revision that was compacted last, without
    the deletions of that revision (etcd issues 18089 and 19179), so a cache would keep a deleted key forever.
    Opened one revision earlier, such a watch is refused as compacted.
    """
    fresh = tuple(change for change in changes if change.mod_revision > after_revision)
    return (
        WatchBatch(revision=fresh[-1].mod_revision, changes=fresh, store=store) if fresh else None
    )
