"""The listeners on Thunderbolt cables: they come and go with the cables, and answer as the agent's API does."""

import asyncio
from pathlib import Path

import aiohttp

from identity.credentials import Credentials
from identity.names import Role
from models.model_store.store import ModelStore
from nodeagent.api.blobs import BlobRoutes
from nodeagent.api.cable_listeners import CableListeners
from nodeagent.peers.uploads import Uploads
from schemas.node import FabricInterface, NodeFabric
from tests.support.agent_api import CLOCK
from tests.support.identities import TestAuthority
from tests.support.model_store import add_model
from tests.support.ports import free_port
from tests.support.waiting import until

COMMIT = "a" * 40
CONTENT = bytes(range(256)) * 100


async def test_a_cable_gives_files_and_refusals_while_it_is_there(tmp_path: Path) -> None:
    authority, store = TestAuthority(tmp_path / "ids"), ModelStore(tmp_path / "models", CLOCK)
    digest = add_model(store, "a/b", COMMIT, {"w": CONTENT}).files[0].sha256
    credentials = Credentials(authority.issue(Role.NODE, "mac-2"), CLOCK)
    client = Credentials(authority.issue(Role.NODE, "mac-1"), CLOCK).client(frozenset({Role.NODE}))
    wire = FabricInterface(name="en0", address="192.0.2.1")
    cable = FabricInterface(name="bridge0", address="127.0.0.1", is_thunderbolt=True)
    fabric = NodeFabric(interfaces=(wire, cable))
    listeners = CableListeners(
        blobs=BlobRoutes(node="mac-2", store=store, uploads=Uploads(CLOCK)),
        credentials=credentials,
        clock=CLOCK,
        address=wire.address,
        port=free_port(),
        fabric=lambda: fabric,
        look_s=0.05,
    )

    async def status(path: str, asked: str) -> int:
        async with (
            aiohttp.ClientSession() as http,
            http.get(
                f"{url}/v1/blobs/{path}",
                ssl=client.context,
                server_hostname=credentials.identity.dns_name,
                headers={"range": asked},
            ) as response,
        ):
            return response.status

    async with asyncio.TaskGroup() as group:
        running = group.create_task(listeners.run())
        await until(listeners.urls, what="the address of the cable")
        (url,) = listeners.urls()
        assert url == f"https://127.0.0.1:{listeners.port}"
        assert await status(digest, "bytes=0-9") == 206
        assert await status(digest, f"bytes={len(CONTENT)}-") == 416
        assert await status("0" * 64, "bytes=0-9") == 404
        fabric = NodeFabric(interfaces=(wire,))
        await until(lambda: not listeners.urls(), what="the end of the listener")
        running.cancel()
