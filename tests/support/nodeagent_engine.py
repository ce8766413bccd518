"""A fake engine: answers on a port as a test wants."""

from typing import Any

from aiohttp import web

from schemas.wire import headers
from schemas.wire.engine_address import EngineAddress

HEALTHY = b'{"state":"Ready","replicaUid":"u1"}'


TOKEN = b'{"usage":{"completion_tokens":1}}'


class FakeEngine:
    """A server in place of an engine; a test sets its answers."""

    def __init__(self) -> None:
        self.health = HEALTHY
        self.completion = TOKEN
        self.embedding = b'{"usage":{"prompt_tokens":1}}'
        self.status = 200
        self.address = EngineAddress("127.0.0.1", 0)
        self.asked = 0
        self.completed: list[tuple[str, Any]] = []
        """The salt header and the body of each completion."""

    async def on_health(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(body=self.health)

    async def on_completion(self, request: web.Request) -> web.Response:
        salt = request.headers.get(headers.CACHE_SALT, "")
        self.completed.append((salt, await request.json()))
        return web.Response(body=self.completion, status=self.status)

    async def on_embedding(self, _: web.Request) -> web.Response:
        return web.Response(body=self.embedding)
