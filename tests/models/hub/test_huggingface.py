"""The adapter to Hugging Face against the stand-in hub: pages, redirects, tokens, limits, and each failure by name."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from models.hub.connection import open_hub_session
from models.hub.errors import (
    HubRateLimitedError,
    HubUnauthorizedError,
    HubUnreachableError,
    ListingRefusedError,
    ModelFetchError,
    ModelGatedError,
    ModelMissingError,
)
from models.hub.huggingface import HuggingFaceHub
from models.hub.model_hub import RemoteFile
from tests.support.hub import COMMIT, REPO, HubFaults, StandInHub, tiny_files
from tests.support.ports import free_port

FILES = tiny_files()
WEIGHTS = "model-00001-of-00002.safetensors"


@asynccontextmanager
async def connected(
    faults: HubFaults | None = None, *, token: str = "", hub_token: str = ""
) -> AsyncIterator[tuple[StandInHub, HuggingFaceHub]]:
    stand_in = StandInHub(repos={REPO: FILES}, faults=faults or HubFaults(), token=hub_token)
    async with stand_in.serve(), open_hub_session() as session:
        yield stand_in, HuggingFaceHub(session, endpoint=stand_in.endpoint, token=token)


async def content(hub: HuggingFaceHub, file: RemoteFile, start: int = 0) -> bytes:
    async with hub.read(REPO, COMMIT, file, start=start) as chunks:
        return b"".join([chunk async for chunk in chunks])


async def listed(hub: HuggingFaceHub) -> dict[str, RemoteFile]:
    return {file.path: file for file in await hub.files(REPO, COMMIT)}


async def test_a_branch_is_resolved_and_a_commit_needs_no_request() -> None:
    async with connected() as (stand_in, hub):
        assert await hub.resolve(REPO, "main") == COMMIT
        assert await hub.resolve(REPO, "a" * 40) == "a" * 40
        assert len(stand_in.seen) == 1


@pytest.mark.parametrize("page_size", [None, 1, 3])
@pytest.mark.parametrize("gzips", [False, True])
async def test_all_pages_of_the_list_are_read(page_size: int | None, gzips: bool) -> None:
    async with connected(HubFaults(page_size=page_size, gzips_json=gzips)) as (_, hub):
        found = await listed(hub)
    assert {path: file.size for path, file in found.items()} == {
        p: len(c) for p, c in FILES.items()
    }
    assert found[WEIGHTS].digest.algorithm == "sha256"
    assert found["config.json"].digest.algorithm == "git-sha1"


@pytest.mark.parametrize("path", [WEIGHTS, "templates/chat template #1.jinja"])
async def test_a_file_is_read_whole_and_from_a_byte(path: str) -> None:
    async with connected() as (_, hub):
        file = (await listed(hub))[path]
        assert await content(hub, file) == FILES[path]
        assert await content(hub, file, 7) == FILES[path][7:]


async def test_a_mirror_without_ranges_serves_the_rest_too() -> None:
    async with connected(HubFaults(ignores_range=True)) as (_, hub):
        file = (await listed(hub))[WEIGHTS]
        assert await content(hub, file, 290_000) == FILES[WEIGHTS][290_000:]


async def test_the_token_stays_with_the_hub_when_another_port_serves_the_file() -> None:
    faults = HubFaults(redirects_to_cdn=True)
    async with connected(faults, token="hf_x", hub_token="hf_x") as (stand_in, hub):
        file = (await listed(hub))[WEIGHTS]
        assert await content(hub, file, 5) == FILES[WEIGHTS][5:]
    (from_cdn,) = stand_in.requests("GET", "/cdn/")
    assert (from_cdn.port, from_cdn.has_token, from_cdn.range) == (
        stand_in.cdn_port,
        False,
        "bytes=5-",
    )
    assert all(one.has_token for one in stand_in.seen if one.port == stand_in.port)


@pytest.mark.parametrize(
    ("faults", "error", "words"),
    [
        pytest.param(HubFaults(status=401), HubUnauthorizedError, "wants a token", id="401"),
        pytest.param(HubFaults(status=403), HubUnauthorizedError, "403", id="403"),
        pytest.param(
            HubFaults(status=403, error_code="GatedRepo"),
            ModelGatedError,
            "accept them",
            id="gated",
        ),
        pytest.param(
            HubFaults(status=401, error_code="RepoNotFound"),
            ModelMissingError,
            "needs a token",
            id="no-repository",
        ),
        pytest.param(HubFaults(status=404), ModelMissingError, "has no revision main", id="404"),
        pytest.param(HubFaults(status=429), HubRateLimitedError, "wait 1 s", id="429"),
        pytest.param(HubFaults(status=500), HubUnreachableError, "answers 500", id="500"),
        pytest.param(HubFaults(loops=True), HubUnreachableError, "in a loop", id="loop"),
    ],
)
async def test_each_failure_has_its_own_error_and_a_sentence(
    faults: HubFaults, error: type[ModelFetchError], words: str
) -> None:
    async with connected(faults) as (_, hub):
        with pytest.raises(error, match=words) as found:
            await hub.resolve(REPO, "main")
        assert type(found.value) is error


async def test_a_refused_token_is_told_apart_from_an_absent_one() -> None:
    async with connected(token="hf_wrong", hub_token="hf_right") as (_, hub):
        with pytest.raises(HubUnauthorizedError, match="refused the token") as found:
            await hub.resolve(REPO, "main")
    assert "hf_wrong" not in str(found.value)


async def test_an_unknown_revision_repository_and_file_are_missing() -> None:
    async with connected() as (_, hub):
        with pytest.raises(ModelMissingError, match="has no revision v9"):
            await hub.resolve(REPO, "v9")
        with pytest.raises(ModelMissingError, match="the files of other/repo"):
            await hub.files("other/repo", COMMIT)
        file = (await listed(hub))[WEIGHTS]
        gone = RemoteFile(path="gone.json", size=file.size, digest=file.digest)
        with pytest.raises(ModelMissingError, match=r"no gone\.json of"):
            await content(hub, gone)


async def test_the_wait_of_a_rate_limit_is_believed_within_limits() -> None:
    async with connected(HubFaults(status=429, retry_after="55")) as (stand_in, hub):
        with pytest.raises(HubRateLimitedError) as found:
            await hub.resolve(REPO, "main")
        assert found.value.retry_after_s == 55
        stand_in.faults.retry_after = "999999999"
        with pytest.raises(HubRateLimitedError) as found:
            await hub.resolve(REPO, "main")
        assert found.value.retry_after_s == 3600


async def test_a_cut_stream_and_an_absent_hub_are_unreachable() -> None:
    async with connected(HubFaults(cut_after=1000)) as (_, hub):
        file = (await listed(hub))[WEIGHTS]
        with pytest.raises(HubUnreachableError, match="broke off"):
            await content(hub, file)
    async with open_hub_session() as session:
        away = HuggingFaceHub(session, endpoint=f"http://127.0.0.1:{free_port()}")
        with pytest.raises(HubUnreachableError, match="cannot be reached"):
            await away.resolve(REPO, "main")


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param({"oid": "../../etc/passwd"}, id="digest-is-a-path"),
        pytest.param({"lfs": {"oid": "ab", "size": 3}}, id="digest-is-short"),
    ],
)
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


@pytest.mark.parametrize("endpoint", ["ftp://x", "huggingface.co", "https://me:pw@x", "http://x?y"])
async def test_an_endpoint_that_is_no_address_is_refused(endpoint: str) -> None:
    async with open_hub_session() as session:
        with pytest.raises(ValueError, match="is no address of a hub"):
            HuggingFaceHub(session, endpoint=endpoint)


@pytest.mark.parametrize("token", ["hf_x\n", "hf x", "hf_\r\nX-Y: z", "\u00fc"])
async def test_a_token_that_would_break_a_header_is_refused(token: str) -> None:
    async with open_hub_session() as session:
        with pytest.raises(HubUnauthorizedError, match="one line of ASCII") as found:
            HuggingFaceHub(session, token=token)
    assert token not in str(found.value)


@pytest.mark.parametrize(
    ("endpoint", "is_allowed"),
    [
        ("https://mirror.example", True),
        ("http://127.0.0.1:8080", True),
        ("http://[::1]:8080", True),
        ("http://localhost", True),
        ("http://mirror.example", False),
        ("http://10.0.0.1:8080", False),
    ],
)
async def test_a_token_crosses_no_network_in_clear(endpoint: str, is_allowed: bool) -> None:
    async with open_hub_session() as session:
        HuggingFaceHub(session, endpoint=endpoint)
        if is_allowed:
            HuggingFaceHub(session, endpoint=endpoint, token="hf_x")
            return
        with pytest.raises(HubUnauthorizedError, match="unencrypted"):
            HuggingFaceHub(session, endpoint=endpoint, token="hf_x")
