"""The route that gives files to other agents, over TLS on a real socket."""

import ssl
from pathlib import Path

import aiohttp
import pytest

from identity.credentials import Credentials
from identity.names import Role
from models.hub.digests import hash_file
from models.model_store.partial_file import open_partial
from models.model_store.store import ModelStore
from nodeagent.api.blobs import BlobRoutes
from nodeagent.peers.uploads import Uploads
from tests.support.agent_api import CLOCK, Api, serving
from tests.support.identities import TestAuthority
from tests.support.model_store import add_model
from tests.support.values import present

COMMIT = "a" * 40
CONTENT = bytes(range(256)) * 20_000


def node_context(fleet: TestAuthority) -> ssl.SSLContext:
    credentials = Credentials(fleet.issue(Role.NODE, "mac-1"), CLOCK)
    return credentials.client(frozenset({Role.NODE})).context


async def ask(
    api: Api, client: ssl.SSLContext, path: str, asked: str = "", method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    headers = {"range": asked} if asked else {}
    async with (
        aiohttp.ClientSession() as http,
        http.request(
            method,
            f"https://127.0.0.1:{api.port}/v1/blobs/{path}",
            ssl=client,
            server_hostname=api.credentials.identity.dns_name,
            headers=headers,
        ) as response,
    ):
        found = {name.lower(): value for name, value in response.headers.items()}
        return response.status, found, await response.read()


def routes(root: Path) -> BlobRoutes:
    return BlobRoutes(node="mac-2", store=ModelStore(root, CLOCK), uploads=Uploads(CLOCK))


async def test_a_node_gets_a_file_whole_in_ranges_and_its_size(tmp_path: Path) -> None:
    fleet, blobs = TestAuthority(tmp_path / "ids"), routes(tmp_path / "models")
    digest = add_model(blobs.store, "a/b", COMMIT, {"w": CONTENT}).files[0].sha256
    async with serving(fleet, blobs=blobs) as api:
        client = node_context(fleet)
        status, headers, body = await ask(api, client, digest)
        assert (status, body, headers["accept-ranges"]) == (200, CONTENT, "bytes")
        status, headers, body = await ask(api, client, digest, "bytes=100-299")
        assert (status, body) == (206, CONTENT[100:300])
        assert headers["content-range"] == f"bytes 100-299/{len(CONTENT)}"
        status, _, body = await ask(api, client, digest, f"bytes={len(CONTENT) - 5}-")
        assert (status, body) == (206, CONTENT[-5:])
        status, headers, _ = await ask(api, client, digest, f"bytes={len(CONTENT)}-")
        assert (status, headers["content-range"]) == (416, f"bytes */{len(CONTENT)}")
        status, headers, body = await ask(api, client, digest, method="HEAD")
        assert (status, headers["content-length"], body) == (200, str(len(CONTENT)), b"")


async def test_a_partial_file_gives_what_is_recorded_or_received(tmp_path: Path) -> None:
    fleet, blobs = TestAuthority(tmp_path / "ids"), routes(tmp_path / "models")
    (tmp_path / "w").write_bytes(CONTENT)
    digest = hash_file(tmp_path / "w").sha256
    blobs.store.prepare()
    path = blobs.store.part_path(digest)
    part = present(open_partial(path, digest, size=len(CONTENT), piece_bytes=1000))
    part.write(CONTENT[:2500])
    async with serving(fleet, blobs=blobs) as api:
        client = node_context(fleet)
        status, headers, body = await ask(api, client, digest.hex, "bytes=500-")
        assert (status, body) == (206, CONTENT[500:2000])
        assert headers["content-range"] == "bytes 500-1999/*"
        status, headers, _ = await ask(api, client, digest.hex, "bytes=2000-")
        assert (status, headers["x-fleet-received-bytes"]) == (416, "2500")
        assert (await ask(api, client, digest.hex))[0] == 404
        # What this process receives is given at once.
        blobs.store.growing[digest] = part
        status, headers, body = await ask(api, client, digest.hex, "bytes=500-")
        assert (status, body) == (206, CONTENT[500:2500])
    part.close()


@pytest.mark.parametrize("path", [
    "..%2f..%2fetc%2fpasswd", "%2e%2e", "A" * 64, "0" * 63, "0" * 64, "g" * 64, "0" * 40 + "%0a",
])  # fmt: skip
async def test_what_is_no_file_here_is_not_found(tmp_path: Path, path: str) -> None:
    fleet, blobs = TestAuthority(tmp_path / "ids"), routes(tmp_path / "models")
    async with serving(fleet, blobs=blobs) as api:
        assert (await ask(api, node_context(fleet), path))[0] == 404


async def test_only_nodes_of_the_fleet_get_files(tmp_path: Path) -> None:
    fleet, blobs = TestAuthority(tmp_path / "ids"), routes(tmp_path / "models")
    digest = add_model(blobs.store, "a/b", COMMIT, {"w": CONTENT}).files[0].sha256
    foreign = TestAuthority(tmp_path / "foreign")
    async with serving(fleet, blobs=blobs) as api:
        admin = Credentials(fleet.issue(Role.ADMIN, "anna"), CLOCK)
        context = admin.client(frozenset({Role.NODE})).context
        assert (await ask(api, context, digest))[0] == 403
        stranger = node_context(foreign)
        stranger.load_verify_locations(cadata=fleet.authority.pem)
        assert await api.status(stranger, f"/v1/blobs/{digest}") == 0
        nobody = ssl.create_default_context(cadata=fleet.authority.pem)
        assert await api.status(nobody, f"/v1/blobs/{digest}") == 403


async def test_a_fifth_upload_is_told_to_wait_and_places_are_given_back(tmp_path: Path) -> None:
    fleet, blobs = TestAuthority(tmp_path / "ids"), routes(tmp_path / "models")
    digest = add_model(blobs.store, "a/b", COMMIT, {"w": CONTENT}).files[0].sha256
    async with serving(fleet, blobs=blobs) as api:
        client = node_context(fleet)
        for _ in range(6):  # refusals and answers give their places back
            assert (await ask(api, client, "0" * 64))[0] == 404
            assert (await ask(api, client, digest, "bytes=0-9"))[0] == 206
        for _ in range(blobs.uploads.most):
            assert blobs.uploads.enter()
        status, headers, _ = await ask(api, client, digest)
        assert (status, "retry-after" in headers) == (429, True)
        blobs.uploads.leave()
        assert (await ask(api, client, digest))[0] == 200


async def test_the_limit_falls_to_a_tenth_while_an_engine_works() -> None:
    is_busy = [True]
    uploads = Uploads(CLOCK, bytes_per_s=1000.0, is_busy=lambda: is_busy[0])
    uploads.count(1)
    assert uploads.bandwidth.bytes_per_s == 100.0
    is_busy[0] = False
    uploads.count(1)
    assert uploads.bandwidth.bytes_per_s == 1000.0
