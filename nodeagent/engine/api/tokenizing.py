"""One request to count tokens as an ASGI response: it needs no slot, only a tokenizer's thread."""

import asyncio
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nodeagent.engine.api import web
from nodeagent.engine.api.telling import Deadline
from nodeagent.engine.errors import RefusedError
from nodeagent.engine.openai import tokenizing
from nodeagent.engine.openai.tokenizing import TokenizeRequest
from nodeagent.engine.service import Service


@dataclass(frozen=True, slots=True)
class TokenizeAnswer:
    """Counts for as long as the client is there."""

    service: Service
    asked: TokenizeRequest
    arrived_s: float
    """When it came, on the service's monotonic clock."""
    timeout_s: float | None = None
    """How long its client waits from then on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count and send."""
        await web.while_connected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = Response(await self._in_time(), media_type="application/json")
        except RefusedError as error:
            response = web.refuse(error.refusal)
        await response(scope, receive, send)

    async def _in_time(self) -> bytes:
        if self.timeout_s is None:
            return await self._body()
        deadline = Deadline(self.arrived_s + self.timeout_s, self.timeout_s)
        try:
            async with asyncio.timeout(deadline.at_s - self.service.clock.monotonic()):
                return await self._body()
        except TimeoutError:
            raise deadline.passed() from None

    async def _body(self) -> bytes:
        tokens = await self.service.tokens(self.asked.request)
        return tokenizing.body(self.asked, tokens, self.service.config.context_length)
