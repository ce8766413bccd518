"""The token of a process's etcd user, shared by all its calls, watches and connections.

etcd verifies a password with bcrypt and writes an entry to its log for each request. Requests that are cancelled and
repeated while etcd is slow keep it slow forever, so a process has at most one request for a token at a time.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

from machinery.backoff import Backoff
from machinery.clock import Clock, SystemClock
from store.errors import (
    AuthOffError,
    PermissionDeniedError,
    SlowStoreError,
    StoreError,
    UnavailableError,
)
from store.etcd.address import EtcdAddress
from store.etcd.error_mapping import slow_error

log = logging.getLogger(__name__)

AUTHENTICATE_S = 10.0
"""The limit of one request. A busy etcd needs seconds, and gets no other request of this process meanwhile."""

_BACKOFF = Backoff(first_s=0.1, limit_s=2.0)
# Somebody may be about to correct the password; after a while each attempt only costs etcd a bcrypt.
_REFUSED = Backoff(first_s=0.2, limit_s=30.0)


class Authentication:
    """Holds the token and renews it. Close it after use.

    A request runs in a task of its own: a caller that gives up does not cancel it. After a failure the next request
    waits, with jittered exponential backoff.
    """

    def __init__(
        self,
        address: EtcdAddress,
        *,
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._address = address
        self._clock = clock or SystemClock()
        self._jitter = jitter
        self._token: str | None = None
        self._is_current = not address.username
        self._is_accepted = False
        self._request: asyncio.Task[None] | None = None
        self._failure: StoreError | None = None
        self._failures = 0
        self._rests_until = float("-inf")
        self._has_logged_off = False

    async def token(self, authenticate: Callable[[], Awaitable[str]], limit_s: float) -> str | None:
        """Return the token to call with; None without a user, or if etcd does not require one.

        `authenticate` requests one from the current endpoint; it is called only if no request is under way.

        Raises:
            PermissionDeniedError: etcd refuses the password.
            UnavailableError: no token within `limit_s` seconds. The request continues.

        """
        if not self._is_current:
            # Wait for a token; begin a request unless one is under way.
            request = self._request
            if request is None or request.done():
                # No group: the request outlives the caller that began it, and `close` ends it.
                loop = asyncio.get_running_loop()
                request = self._request = loop.create_task(self._renew(authenticate))
            ended, _ = await asyncio.wait({request}, timeout=limit_s)
            if ended and not request.cancelled():
                request.result()  # a defect, not an answer of etcd
            if not self._is_current:
                raise self._error(limit_s)
        return self._token

    def accept(self, token: str | None) -> None:
        """Record that etcd accepted the token."""
        if token == self._token and self._is_current:
            self._is_accepted, self._failures = True, 0

    def reject(self, token: str | None) -> None:
        """Request a new token next time, because etcd rejected this one; later rejections of it are ignored."""
        if token != self._token or not self._is_current or not self._address.username:
            return
        self._is_current = False
        if not self._is_accepted:
            # A token that etcd never accepts, such as on a member that lags behind: do not request them in a row.
            self._rest(_BACKOFF)

    async def close(self) -> None:
        """Cancel the request that is under way."""
        if self._request is not None:
            self._request.cancel()
            with suppress(asyncio.CancelledError):
                await self._request

    async def _renew(self, authenticate: Callable[[], Awaitable[str]]) -> None:
        pause_s = self._rests_until - self._clock.monotonic()
        if pause_s > 0:
            await self._clock.sleep(pause_s)
        try:
            self._token = await authenticate()
        except AuthOffError:
            # Processes get their passwords before etcd requires them: see `init-auth`. From then on a call
            # without a token is refused, and a token is requested.
            self._token = None
            if not self._has_logged_off:
                log.warning("etcd does not require passwords", extra={"etcd": str(self._address)})
            self._has_logged_off = True
        except UnavailableError as error:
            # A new error: the traceback of this one would hold the connection after it was closed.
            self._failure = _without_traceback(error)
            self._rest(_BACKOFF)
            return
        except StoreError as error:
            self._failure = PermissionDeniedError(
                f"etcd refuses user {self._address.username!r}: {error}"
            )
            self._rest(_REFUSED)
            return
        self._failure, self._is_current, self._is_accepted = None, True, False

    def _rest(self, backoff: Backoff) -> None:
        self._failures += 1
        delay_s = backoff.delay_s(self._failures, jitter=self._jitter())
        self._rests_until = self._clock.monotonic() + delay_s

    def _error(self, limit_s: float) -> StoreError:
        """Return the reason why there is no token: a new error for each caller."""
        if self._failure is not None:
            # No call was made, so nothing was written: the error is not ambiguous.
            return _without_traceback(self._failure)
        return slow_error(str(self._address), limit_s, "to the password")


def _without_traceback(error: StoreError) -> StoreError:
    """Return a new error of the same kind and words, which is not ambiguous."""
    if isinstance(error, UnavailableError):
        kind = SlowStoreError if isinstance(error, SlowStoreError) else UnavailableError
        return kind(str(error), absent=error.absent)
    return PermissionDeniedError(str(error))
