"""An agent as a mirror: the real huggingface_hub downloads from its disk, over TLS, with a certificate."""

import ssl
from pathlib import Path

import pytest

from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.names import Role
from models.model_store.store import ModelStore
from nodeagent.api.blobs import BlobRoutes
from nodeagent.api.hub_mirror import HubMirrorRoutes
from nodeagent.peers.uploads import Uploads
from tests.support.agent_api import CLOCK, Api, serving
from tests.support.hub import COMMIT, REPO, run_hub_client, tiny_files
from tests.support.identities import TestAuthority
from tests.support.model_store import add_model, files_below

FILES = tiny_files()
OTHER = "ab" * 20


def mirror(root: Path) -> BlobRoutes:
    store = ModelStore(root, CLOCK)
    add_model(store, REPO, OTHER, {"config.json": b"{}"})
    add_model(store, REPO, COMMIT, FILES)
    return BlobRoutes(node="mac-2", store=store, uploads=Uploads(CLOCK))


def context(folder: IdentityFolder) -> ssl.SSLContext:
    return Credentials(folder, CLOCK).client(frozenset({Role.NODE})).context


async def download(api: Api, folder: Path, identity: IdentityFolder, *revisions: str) -> list[Path]:
    return await run_hub_client(
        f"https://127.0.0.1:{api.port}/hub",
        folder,
        *revisions,
        IDENTITY=str(identity.path),
        NODE=api.credentials.identity.dns_name,
    )


async def test_the_real_client_gets_the_same_bytes_from_an_agent(tmp_path: Path) -> None:
    fleet, blobs = TestAuthority(tmp_path / "ids"), mirror(tmp_path / "models")
    async with serving(fleet, blobs=blobs, mirror=HubMirrorRoutes(blobs)) as api:
        identity = fleet.issue(Role.ADMIN, "anna")
        paths = await download(api, tmp_path / "cache", identity, "main", COMMIT)
        assert [files_below(folder) for folder in paths] == [FILES, FILES]
        assert [folder.name for folder in paths] == [COMMIT, COMMIT]


async def test_mirror_is_closed_without_its_flag_and_without_a_certificate(tmp_path: Path) -> None:
    fleet, blobs = TestAuthority(tmp_path / "ids"), mirror(tmp_path / "models")
    path = f"/hub/api/models/{REPO}/revision/main"
    admin = context(fleet.issue(Role.ADMIN, "anna"))
    async with serving(fleet, blobs=blobs) as api:
        assert await api.status(admin, path) == 404
    async with serving(fleet, blobs=blobs, mirror=HubMirrorRoutes(blobs)) as api:
        nobody = ssl.create_default_context(cadata=fleet.authority.pem)
        assert await api.status(nobody, path) == 403
        assert await api.status(admin, path) == 200


@pytest.mark.parametrize("path", [
    "api/models/nobody/nothing/revision/main",
    f"api/models/{REPO}/revision/dev",
    f"api/models/{REPO}/tree/{'0' * 40}",
    "api/models/-/..%2f/revision/main",
    f"{REPO}/resolve/{COMMIT}/absent.json",
    f"{REPO}/resolve/{COMMIT}/..%2f..%2fblobs%2f.lock",
])  # fmt: skip
async def test_what_is_not_on_the_disk_is_not_found(tmp_path: Path, path: str) -> None:
    fleet, blobs = TestAuthority(tmp_path / "ids"), mirror(tmp_path / "models")
    async with serving(fleet, blobs=blobs, mirror=HubMirrorRoutes(blobs)) as api:
        admin = context(fleet.issue(Role.ADMIN, "anna"))
        assert await api.status(admin, f"/hub/{path}") == 404


async def test_a_client_of_the_mirror_waits_for_a_place(tmp_path: Path) -> None:
    fleet, blobs = TestAuthority(tmp_path / "ids"), mirror(tmp_path / "models")
    for _ in range(blobs.uploads.most - 1):
        assert blobs.uploads.enter()
    async with serving(fleet, blobs=blobs, mirror=HubMirrorRoutes(blobs)) as api:
        identity = fleet.issue(Role.ADMIN, "anna")
        (path,) = await download(api, tmp_path / "cache", identity, COMMIT)
        assert files_below(path) == FILES
