"""The listeners that give files of models over Thunderbolt cables: the agent's API listens on one address, which others reach.

They serve the files alone, for certificates of nodes.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fastapi import FastAPI

from identity.credentials import Credentials
from identity.listeners import server_security
from identity.names import Role
from machinery.clock import Clock
from machinery.http_server import AdminServer
from nodeagent.api.blobs import BlobRoutes
from nodeagent.api.server import on_refused
from nodeagent.peers.links import is_cable
from schemas.node import NodeFabric
from schemas.wire.errors import RefusedError

_LOOK_S: Final = 5.0
_MOST: Final = 8


@dataclass(kw_only=True)
class CableListeners:
    """One server for each address on a Thunderbolt cable, while it is there."""

    blobs: BlobRoutes
    credentials: Credentials
    clock: Clock
    address: str
    """The address on which the agent's API listens."""
    port: int
    fabric: Callable[[], NodeFabric]
    look_s: float = _LOOK_S
    """Seconds between two looks at the cables."""
    _servers: dict[str, AdminServer] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def urls(self) -> list[str]:
        """Return the URLs at which the files are given."""
        found = (server.url.partition(":") for server in self._servers.values())
        return [f"https:{rest}" for _, colon, rest in found if colon]

    async def run(self) -> None:
        """Follow the cables, forever."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(RefusedError, on_refused)
        self.blobs.add_to(app)
        async with asyncio.TaskGroup() as group:
            while True:
                self._follow(app, group)
                await self.clock.sleep(self.look_s)

    def _follow(self, app: FastAPI, group: asyncio.TaskGroup) -> None:
        fabric = self.fabric()
        cables = [
            interface.address for interface in fabric.interfaces if is_cable(interface, fabric)
        ]
        wanted = [fromkey for fromkey in dict.fromkeys(cables) if fromkey != self.address][:_MOST]
        for address in self._servers.keys() - set(wanted):
            self._tasks.pop(address).cancel()
            del self._servers[address]
        for address in wanted:
            if address not in self._servers:
                server = AdminServer(
                    app,
                    self.clock,
                    (address, self.port),
                    lambda: None,
                    security=server_security(
                        self.credentials, frozenset({Role.NODE}), is_insecure=False
                    ),
                )
                self._servers[address] = server
                self._tasks[address] = group.create_task(server.run())
