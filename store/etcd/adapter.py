"""How every call to etcd is made, whatever the way: places, turns of the endpoints, tokens.

Endpoints take turns: whoever fails is not asked next.

What of a watch's events is new, for both ways to etcd.
"""

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
# A renewal must find a frozen member out, and a second one, while a lease of four seconds lives:
# it is sent after a third of that.
RENEW_S = 1.0
# Shorter than a call, so that a call can still go to another endpoint.
CONNECT_S = 1.0
# Unary calls in flight at once; waiting for a place does not count against a call's time.
AT_ONCE = 32
# Embedded etcd reports progress every 5 s; an external one may not, and then an idle watch is
# opened anew this often, which costs one request.
IDLE_S = 17.0


class EndpointCaller:
    """Makes calls to the etcd at an address.

    `authenticate` returns a token for the address's user; it makes one call to whose turn it is.
    """

    def __init__(self, address: EtcdAddress, authenticate: Callable[[], Awaitable[str]]) -> None:
        self._address = address
        self._authenticate = authenticate
        self._places = asyncio.Semaphore(AT_ONCE)
        self._token: str | None = None
        self._has_asked = False
        # etcd checks a password with bcrypt: 32 calls at once must not ask for 32 tokens.
        self._authenticating = asyncio.Lock()
        self.turn = 0

    def pass_on(self, turn: int) -> None:
        """Ask the next endpoint from here on; many calls that fail at once are one failure."""
        if self.turn == turn:
            self.turn += 1

    async def make(
        self, exchange: Callable[[str | None], Awaitable[T]], *, limit_s: float = CALL_S
    ) -> T:
        """Return what `exchange` returns, which makes one call to whose turn it is, with a token.

        Raises:
            StoreError: what `exchange` raised last.

        """
        async with self._places:
            for _ in self._address.endpoints[1:]:
                try:
                    return await self._ask(exchange, limit_s)
                except UnavailableError as error:
                    # Where nothing can have been written, the next may be asked, even to write.
                    if error.ambiguous:
                        raise
            return await self._ask(exchange, limit_s)

    async def _ask(self, exchange: Callable[[str | None], Awaitable[T]], limit_s: float) -> T:
        """Call one endpoint; once more with a fresh token if ours is stale."""
        token = await self.token(limit_s)
        try:
            return await exchange(token)
        except UnauthenticatedError as error:
            if not self._address.username:
                raise UnauthenticatedError(
                    f"etcd at {self._address} asks for a user and a password, and got none ({error})"
                ) from error
        except PermissionDeniedError as error:
            raise PermissionDeniedError(
                f"etcd at {self._address} does not let user {self._address.username!r} do this: {error}"
            ) from error
        self.forget(token)
        return await exchange(await self.token(limit_s))

    async def token(self, limit_s: float = CALL_S) -> str | None:
        """Return the token to call with; None if we have no user, or etcd asks for none."""
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
                f"etcd at {self._address}: no answer to our password in {limit_s:g} s"
            ) from error

    async def _fresh_token(self) -> str | None:
        try:
            return await self._authenticate()
        except AuthOffError:
            # Processes get their passwords before users are asked for them: see `init-auth`. Once
            # they are, a call without a token is refused, and we ask again.
            log.warning("etcd asks nobody for a password", extra={"etcd": str(self._address)})
            return None
        except UnavailableError as error:
            # No call was made yet, so nothing was written.
            raise UnavailableError(str(error)) from error
        except StoreError as error:
            raise PermissionDeniedError(
                f"etcd refuses user {self._address.username!r}: {error}"
            ) from error

    def forget(self, token: str | None) -> None:
        """Ask for a fresh token next time, if this is still the one in use."""
        if self._token == token:
            self._has_asked = False


def drop_seen_changes(
    changes: tuple[KeyChange, ...], after_revision: int, store: str
) -> WatchBatch | None:
    """Return the changes after a revision, None without any; `changes` are etcd's events in order.

    Watches are opened at the revision that was seen last, not at the one after it, and what was seen
    is dropped here. Older etcd (3.4.23 does) lets a watch begin at the revision that was compacted
    last, and tells nothing of what was deleted by it (etcd issues 18089 and 19179): a cache would keep
    that key for ever. Begun one earlier, such a watch is refused as compacted.
    """
    fresh = tuple(change for change in changes if change.mod_revision > after_revision)
    return (
        WatchBatch(revision=fresh[-1].mod_revision, changes=fresh, store=store) if fresh else None
    )
