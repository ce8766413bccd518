"""The parts that both etcd adapters share: endpoint rotation, tokens, limits, and de-duplication of watch events."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from machinery.backoff import Backoff, RetryBudget
from store.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from store.etcd.address import EtcdAddress
from store.etcd.authentication import Authentication
from store.port import KeyChange, WatchBatch

T = TypeVar("T")

CALL_S = 2.0
# A renewal is sent after a third of the lease's time. Within a lease of four seconds there must be time for it to fail
# on a frozen member, and on a second one.
RENEW_S = 1.0
# Shorter than a call, so that a call still has time for another endpoint.
CONNECT_S = 1.0
# Unary calls in flight at once; waiting for a slot does not count against a call's time. Over HTTP each has a connection.
AT_ONCE = 32
# A watch counts as broken if nothing is heard of etcd for this long, and etcd does not answer when it is asked.
IDLE_S = 17.0
# Followers of a watch hear of etcd at least this often: gateways report a store that is silent for longer than 7 s.
HEARTBEAT_S = 4.0
# Between two attempts of one read: the second one goes to another endpoint, or to a fresh connection.
_RETRY = Backoff(first_s=0.02, limit_s=0.2)


class EndpointCaller:
    """Makes calls to the etcd at an address; a failing endpoint is followed by the next one.

    `authenticate` returns a token for the address's user; it makes one call to the current endpoint.
    """

    def __init__(
        self,
        address: EtcdAddress,
        authenticate: Callable[[], Awaitable[str]],
        authentication: Authentication | None = None,
        *,
        at_once: int = AT_ONCE,
    ) -> None:
        """Prepare to call; an `authentication` that several connections share is closed by its owner."""
        self._address = address
        self._authenticate = authenticate
        self._owns_authentication = authentication is None
        self._authentication = authentication or Authentication(address)
        self._slots = asyncio.Semaphore(at_once)
        self._budget = RetryBudget()
        self.turn = 0

    async def close(self) -> None:
        if self._owns_authentication:
            await self._authentication.close()

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

    async def read(
        self,
        exchange: Callable[[str | None], Awaitable[T]],
        *,
        limit_s: float = CALL_S,
        tries: int = 3,
    ) -> T:
        """Do the same with a call that may be repeated, on another endpoint or a fresh connection.

        While most calls fail, it is not repeated: retries must not add to the load of a sick etcd.
        """
        for attempt in range(1, tries + 1):
            try:
                found = await self.call(exchange, limit_s=limit_s)
            except UnavailableError:
                self._budget.record_failure()
                if attempt == tries or not self._budget.allows_retry:
                    raise
                await asyncio.sleep(_RETRY.delay_s(attempt, jitter=random.random()))
            else:
                self._budget.record_success()
                return found
        raise AssertionError("unreachable")

    async def _ask(self, exchange: Callable[[str | None], Awaitable[T]], limit_s: float) -> T:
        """Call one endpoint; retry once with a fresh token if the token is stale."""
        try:
            return await self._exchange(exchange, limit_s)
        except UnauthenticatedError as error:
            if not self._address.username:
                raise UnauthenticatedError(
                    f"etcd at {self._address} requires a user and a password, and got none ({error})"
                ) from error
        return await self._exchange(exchange, limit_s)

    async def _exchange(self, exchange: Callable[[str | None], Awaitable[T]], limit_s: float) -> T:
        token = await self.token(limit_s)
        try:
            found = await exchange(token)
        except UnauthenticatedError:
            self.reject_token(token)
            raise
        except PermissionDeniedError as error:
            self.accept_token(token)
            raise PermissionDeniedError(
                f"etcd at {self._address} denies this to user {self._address.username!r}: {error}"
            ) from error
        self.accept_token(token)
        return found

    async def token(self, limit_s: float = CALL_S) -> str | None:
        """Return the token to call with; raises as `Authentication.token`."""
        return await self._authentication.token(self._authenticate, limit_s)

    def accept_token(self, token: str | None) -> None:
        """Record that etcd accepted the token."""
        self._authentication.accept(token)

    def reject_token(self, token: str | None) -> None:
        """Request a fresh token next time, because etcd rejected this one."""
        self._authentication.reject(token)


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
