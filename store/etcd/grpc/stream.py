"""A stream to one endpoint, and what gRPC's failures mean to us."""

import asyncio
from collections.abc import Callable
from typing import Generic, cast

import grpc
import grpc.aio

from store.errors import StoreError, UnavailableError
from store.etcd.calls import CALL_S
from store.etcd.grpc.methods import Answer, Request
from store.etcd.meanings import exception_of

# What grpc itself says of connections that broke ("Internal error from Core", "Channel closed").
_BROKEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)


class Stream(Generic[Request, Answer]):
    """A stream to one endpoint: requests there, answers back. To be closed."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[Request, Answer]",
        where: str,
        blame: Callable[[], None],
    ) -> None:
        self._call = call
        self._where = where
        self._blame = blame

    async def send(self, request: Request, *, limit_s: float = CALL_S) -> None:
        """Send a request.

        Raises:
            StoreError: the stream broke, or the request did not go away in time.

        """
        try:
            async with asyncio.timeout(limit_s):
                await self._call.write(request)
        except TimeoutError as error:
            raise self.failure(f"a request did not go away in {limit_s:g} s") from error
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise self._error_of(error) from error

    async def receive(self, *, limit_s: float) -> Answer:
        """Return the next answer.

        Raises:
            StoreError: the stream broke or ended, or nothing came in time.

        """
        answer = await self.next(limit_s=limit_s)
        if answer is None:
            raise self.failure("the stream ended")
        return answer

    async def next(self, *, limit_s: float) -> Answer | None:
        """Return the next answer; None if the server says that there is none any more.

        Raises:
            StoreError: the stream broke, or nothing came in time.

        """
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._call.read()
        except TimeoutError as error:
            raise self.failure(f"nothing heard for {limit_s:g} s") from error
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise self._error_of(error) from error
        return None if answer is grpc.aio.EOF else cast("Answer", answer)

    def failure(self, what: str) -> UnavailableError:
        """Return the error for a stream that is of no use any more; the next one goes elsewhere."""
        self._blame()
        return UnavailableError(f"{self._where}: {what}")

    def _error_of(self, error: BaseException) -> StoreError:
        self._blame()
        return error_of(error, self._where)

    def close(self) -> None:
        self._call.cancel()


def error_of(error: BaseException, where: str) -> StoreError:
    """Return our error for grpc's; what was sent and not answered may have been done."""
    if isinstance(error, grpc.aio.AioRpcError):
        found = exception_of(error.code().value[0], str(error.details()))
        if not isinstance(found, UnavailableError) and error.code() not in _BROKEN:
            return found
        return UnavailableError(f"{where}: {error.details()}", ambiguous=True)
    what = str(error) or type(error).__name__
    return UnavailableError(f"{where}: {what}", ambiguous=True)
