"""One request to count tokens as an ASGI response: it needs no slot, only a tokenizer's thread."""

from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from nodeagent.engine.api.whole import WholeAnswer
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
        answer = WholeAnswer(self.service, self._body, self.arrived_s, self.timeout_s)
        await answer(scope, receive, send)

    async def _body(self) -> bytes:
        tokens = await self.service.tokens(self.asked.request)
        return tokenizing.body(self.asked, tokens, self.service.config.context_length)
