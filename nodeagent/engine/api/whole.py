"""An answer that is not streamed as an ASGI response: it is sent as a whole, or refused."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nodeagent.engine.api import web
from nodeagent.engine.api.telling import Deadline
from nodeagent.engine.errors import RefusedError
from nodeagent.engine.service import Service


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """Works on it for as long as the client is there."""

    service: Service
    make: Callable[[], Awaitable[bytes]]
    """Returns the body, or raises RefusedError; it is cancelled when the client leaves or its time is over."""
    arrived_s: float
    """When the request came, on the service's monotonic clock."""
    timeout_s: float | None
    """How long its client waits from then on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make it and send it."""
        await web.while_connected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = Response(await self._in_time(), media_type="application/json")
        except RefusedError as error:
            response = web.refuse(error.refusal)
        await response(scope, receive, send)

    async def _in_time(self) -> bytes:
        if self.timeout_s is None:
            return await self.make()
        deadline = Deadline(self.arrived_s + self.timeout_s, self.timeout_s)
        try:
            async with asyncio.timeout(deadline.at_s - self.service.clock.monotonic()):
                return await self.make()
        except TimeoutError:
            raise deadline.passed() from None
