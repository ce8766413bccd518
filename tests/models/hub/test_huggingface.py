"""The adapter to Hugging Face beyond what all adapters have in common: commits, pages, error codes, digests of Git."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from models.hub.connection import open_hub_session
from models.hub.errors import (
    ListingRefusedError,
    ModelFetchError,
    ModelGatedError,
    ModelMissingError,
)
from models.hub.huggingface import HuggingFaceHub
from models.hub.model_hub import RemoteFile
from tests.support.hub import COMMIT, REPO, HubFaults, StandInHub, tiny_files

FILES = tiny_files()
WEIGHTS = "model-00001-of-00002.safetensors"


@asynccontextmanager
async def connected(
    faults: HubFaults | None = None, *, token: str = "", hub_token: str = ""
) -> AsyncIterator[tuple[StandInHub, HuggingFaceHub]]:
    stand_in = StandInHub(repos={REPO: FILES}, faults=faults or HubFaults(), token=hub_token)
    async with stand_in.serve(), open_hub_session() as session:
        yield stand_in, HuggingFaceHub(session, endpoint=stand_in.endpoint, token=token)


async def listed(hub: HuggingFaceHub) -> dict[str, RemoteFile]:
    return {file.path: file for file in await hub.files(REPO, COMMIT)}


@pytest.mark.parametrize("page_size", [None, 1, 3])
@pytest.mark.parametrize("gzips", [False, True])
async def test_all_pages_of_the_list_are_read(page_size: int | None, gzips: bool) -> None:
    async with connected(HubFaults(page_size=page_size, gzips_json=gzips)) as (_, hub):
        files = await listed(hub)
    assert {path: file.size for path, file in files.items()} == {
        p: len(c) for p, c in FILES.items()
    }
    assert files[WEIGHTS].digest.algorithm == "sha256"
    assert files["config.json"].digest.algorithm == "git-sha1"


@pytest.mark.parametrize(("faults", "error", "words"), [
    pytest.param(HubFaults(status=403, error_code="GatedRepo"), ModelGatedError, "accept them", id="gated"),
    pytest.param(HubFaults(status=401, error_code="RepoNotFound"), ModelMissingError, "needs a token", id="no-repository"),
])  # fmt: skip
async def test_each_error_code_of_the_hub_has_its_own_error(
    faults: HubFaults, error: type[ModelFetchError], words: str
) -> None:
    async with connected(faults) as (_, hub):
        with pytest.raises(error, match=words) as info:
            await hub.resolve(REPO, "main")
        assert type(info.value) is error


@pytest.mark.parametrize("entry", [
    pytest.param({"oid": "../../etc/passwd"}, id="digest-is-a-path"),
    pytest.param({"lfs": {"oid": "ab", "size": 3}}, id="digest-is-short"),
])  # fmt: skip
async def test_a_list_with_a_malformed_digest_is_refused(entry: dict[str, object]) -> None:
    one = {"type": "file", "path": "a.json", "size": 3, "oid": "0" * 40, **entry}
    async with connected(HubFaults(listing=[one])) as (_, hub):
        with pytest.raises(ListingRefusedError, match="digest"):
            await hub.files(REPO, COMMIT)


async def test_a_list_that_is_too_long_is_not_read_to_its_end() -> None:
    many: list[dict[str, object]] = [
        {"type": "file", "path": f"{number}.json", "size": 1, "oid": "0" * 40}
        for number in range(10_001)
    ]
    async with connected(HubFaults(listing=many, page_size=1000)) as (_, hub):
        with pytest.raises(ListingRefusedError, match="more than 10000 files"):
            await hub.files(REPO, COMMIT)
    async with connected(HubFaults(listing=many[:200], page_size=1)) as (stand_in, hub):
        with pytest.raises(ListingRefusedError, match="more than 100 pages"):
            await hub.files(REPO, COMMIT)
        assert len(stand_in.seen) == 100
