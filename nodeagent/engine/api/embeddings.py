"""One request for embeddings as an ASGI response: nothing is streamed, so it ends as a whole or is refused."""

import asyncio
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from nodeagent.engine.api.whole import WholeAnswer
from nodeagent.engine.jobs import Embedded
from nodeagent.engine.openai import embeddings
from nodeagent.engine.openai.embeddings import EmbeddingRequest
from nodeagent.engine.service import Service


@dataclass(frozen=True, slots=True)
class EmbeddingAnswer:
    """The request leaves its slot whichever way this ends."""

    service: Service
    request: EmbeddingRequest
    arrived_s: float
    """When it came, on the service's monotonic clock."""
    timeout_s: float | None = None
    """How long its client waits from then on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Embed and send."""
        answer = WholeAnswer(self.service, self._body, self.arrived_s, self.timeout_s)
        await answer(scope, receive, send)

    async def _body(self) -> bytes:
        how = self.service.admit().ready.pooling
        asked, ticket = await self.service.enter_embedding(self.request)
        try:
            made = await ticket.next()
        finally:
            self.service.admission.leave(ticket)
        assert isinstance(made, Embedded)
        assert how is not None  # else it had been refused
        return await asyncio.to_thread(embeddings.body, self.request, how, asked, made)
