"""Bodies of HTTP requests, read whole: bounded in size, time and number. Their senders may be strangers."""

import asyncio

from starlette.requests import ClientDisconnect, Request


class RequestRefusedError(Exception):
    """A request that is answered with an error: its HTTP status, and when to try again."""

    def __init__(self, status: int, message: str, *, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        return {"retry-after": str(self.retry_after_s)} if self.retry_after_s else {}


class BodyReader:
    """Reads the bodies of one port."""

    def __init__(self, *, limit_bytes: int, limit_s: float, at_once: int) -> None:
        """`at_once`: the most bodies in memory at a time."""
        self._limit_bytes = limit_bytes
        self._limit_s = limit_s
        self._at_once = at_once
        self._bodies = 0

    async def read(self, request: Request) -> bytes:
        """Return the body of a request. Raises RequestRefusedError: it is too large, too slow or incomplete."""
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._limit_bytes:
            raise self._too_large()
        if self._bodies >= self._at_once:
            raise RequestRefusedError(503, "too many requests at a time", retry_after_s=1)
        self._bodies += 1
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._read(request)
        except TimeoutError as error:
            message = f"the body did not arrive within {self._limit_s:g} s"
            raise RequestRefusedError(408, message) from error
        except ClientDisconnect as error:
            raise RequestRefusedError(400, "the body is not complete") from error
        finally:
            self._bodies -= 1

    async def _read(self, request: Request) -> bytes:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._limit_bytes:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> RequestRefusedError:
        return RequestRefusedError(413, f"the body has more than {self._limit_bytes:,} bytes")
