"""The contract of `ModelHub`, with each adapter: ranges, redirects, tokens, limits, and each failure by name."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import pytest

from models.hub.connection import open_hub_session
from models.hub.errors import (
    HubRateLimitedError,
    HubUnauthorizedError,
    HubUnreachableError,
    ModelFetchError,
    ModelMissingError,
)
from models.hub.huggingface import HuggingFaceHub
from models.hub.model_hub import ModelHub, RemoteFile
from models.hub.modelscope import ModelScopeHub
from tests.support.hub import REPO, HubFaults, StandInHub, tiny_files
from tests.support.modelscope import StandInModelScope
from tests.support.ports import free_port

FILES = tiny_files()
WEIGHTS = "model-00001-of-00002.safetensors"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One kind of hub: its stand-in, its adapter, and the branch that repositories have."""

    stand_in: type[StandInHub]
    adapter: type[HuggingFaceHub | ModelScopeHub]
    branch: str


SOURCES: Final = {
    "huggingface": Source(stand_in=StandInHub, adapter=HuggingFaceHub, branch="main"),
    "modelscope": Source(stand_in=StandInModelScope, adapter=ModelScopeHub, branch="master"),
}


@pytest.fixture(params=sorted(SOURCES))
def source(request: pytest.FixtureRequest) -> Source:
    return SOURCES[request.param]


@asynccontextmanager
async def connected(
    source: Source, faults: HubFaults | None = None, *, token: str = "", hub_token: str = ""
) -> AsyncIterator[tuple[StandInHub, ModelHub]]:
    stand_in = source.stand_in(repos={REPO: FILES}, faults=faults or HubFaults(), token=hub_token)
    async with stand_in.serve(), open_hub_session() as session:
        yield stand_in, source.adapter(session, endpoint=stand_in.endpoint, token=token)


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The files of the branch, as the hub lists them."""

    hub: ModelHub
    commit: str
    files: dict[str, RemoteFile]

    async def content(self, path: str, start: int = 0) -> bytes:
        async with self.hub.read(REPO, self.commit, self.files[path], start=start) as chunks:
            return b"".join([chunk async for chunk in chunks])


async def listed(source: Source, hub: ModelHub) -> Commit:
    commit = await hub.resolve(REPO, source.branch)
    files = {file.path: file for file in await hub.files(REPO, commit)}
    return Commit(hub=hub, commit=commit, files=files)


async def test_a_branch_is_resolved_to_the_same_commit_and_a_commit_needs_no_request(
    source: Source,
) -> None:
    async with connected(source) as (stand_in, hub):
        found = await hub.resolve(REPO, source.branch)
        assert await hub.resolve(REPO, source.branch) == found
        before = len(stand_in.seen)
        assert await hub.resolve(REPO, found) == found
        assert len(stand_in.seen) == before


async def test_the_list_has_all_files_with_sizes_and_digests(source: Source) -> None:
    async with connected(source, HubFaults(gzips_json=True)) as (_, hub):
        files = (await listed(source, hub)).files
    assert {path: file.size for path, file in files.items()} == {
        path: len(content) for path, content in FILES.items()
    }
    assert files[WEIGHTS].digest.algorithm == "sha256"


@pytest.mark.parametrize("path", [WEIGHTS, "templates/chat template #1.jinja"])
async def test_a_file_is_read_whole_and_from_a_byte(source: Source, path: str) -> None:
    async with connected(source) as (_, hub):
        commit = await listed(source, hub)
        assert await commit.content(path) == FILES[path]
        assert await commit.content(path, 7) == FILES[path][7:]


async def test_a_mirror_without_ranges_serves_the_rest_too(source: Source) -> None:
    async with connected(source, HubFaults(ignores_range=True)) as (_, hub):
        commit = await listed(source, hub)
        assert await commit.content(WEIGHTS, 290_000) == FILES[WEIGHTS][290_000:]


async def test_token_stays_with_the_hub_when_another_port_serves_the_file(source: Source) -> None:
    faults = HubFaults(redirects_to_cdn=True)
    async with connected(source, faults, token="hf_x", hub_token="hf_x") as (stand_in, hub):
        commit = await listed(source, hub)
        assert await commit.content(WEIGHTS, 5) == FILES[WEIGHTS][5:]
    (from_cdn,) = stand_in.requests("GET", "/cdn/")
    assert (from_cdn.port, from_cdn.has_token, from_cdn.range) == (
        stand_in.cdn_port,
        False,
        "bytes=5-",
    )
    assert all(one.has_token for one in stand_in.seen if one.port == stand_in.port)


@pytest.mark.parametrize(("faults", "error", "words"), [
    pytest.param(HubFaults(status=401), HubUnauthorizedError, "wants a token", id="401"),
    pytest.param(HubFaults(status=403), HubUnauthorizedError, "403", id="403"),
    pytest.param(HubFaults(status=404), ModelMissingError, "has no revision m", id="404"),
    pytest.param(HubFaults(status=429), HubRateLimitedError, "wait 1 s", id="429"),
    pytest.param(HubFaults(status=500), HubUnreachableError, "answers 500", id="500"),
    pytest.param(HubFaults(loops=True), HubUnreachableError, "in a loop", id="loop"),
])  # fmt: skip
async def test_each_failure_has_its_own_error_and_a_sentence(
    source: Source, faults: HubFaults, error: type[ModelFetchError], words: str
) -> None:
    async with connected(source, faults) as (_, hub):
        with pytest.raises(error, match=words) as info:
            await hub.resolve(REPO, source.branch)
        assert type(info.value) is error


async def test_a_refused_token_is_told_apart_from_an_absent_one(source: Source) -> None:
    async with connected(source, token="hf_wrong", hub_token="hf_right") as (_, hub):
        with pytest.raises(HubUnauthorizedError, match="refused the token") as info:
            await hub.resolve(REPO, source.branch)
    assert "hf_wrong" not in str(info.value)


async def test_an_unknown_revision_repository_and_file_are_missing(source: Source) -> None:
    async with connected(source) as (_, hub):
        with pytest.raises(ModelMissingError, match="has no revision v9"):
            await hub.resolve(REPO, "v9")
        with pytest.raises(ModelMissingError, match="of other/repo"):
            await hub.files("other/repo", "a" * 40)
        commit = await listed(source, hub)
        there = commit.files[WEIGHTS]
        commit.files["gone.json"] = RemoteFile(
            path="gone.json", size=there.size, digest=there.digest
        )
        with pytest.raises(ModelMissingError, match=r"no gone\.json of"):
            await commit.content("gone.json")


async def test_the_wait_of_a_rate_limit_is_believed_within_limits(source: Source) -> None:
    async with connected(source, HubFaults(status=429, retry_after="55")) as (stand_in, hub):
        with pytest.raises(HubRateLimitedError) as info:
            await hub.resolve(REPO, source.branch)
        assert info.value.retry_after_s == 55
        stand_in.faults.retry_after = "999999999"
        with pytest.raises(HubRateLimitedError) as info:
            await hub.resolve(REPO, source.branch)
        assert info.value.retry_after_s == 3600


async def test_a_cut_stream_and_an_absent_hub_are_unreachable(source: Source) -> None:
    async with connected(source) as (stand_in, hub):
        commit = await listed(source, hub)
        stand_in.faults.cut_after = 1000
        with pytest.raises(HubUnreachableError, match="broke off"):
            await commit.content(WEIGHTS)
    async with open_hub_session() as session:
        away = source.adapter(session, endpoint=f"http://127.0.0.1:{free_port()}")
        with pytest.raises(HubUnreachableError, match="cannot be reached"):
            await away.resolve(REPO, source.branch)


async def test_an_answer_of_another_form_is_no_hub(source: Source) -> None:
    other = SOURCES["modelscope" if source is SOURCES["huggingface"] else "huggingface"]
    async with connected(other) as (stand_in, _), open_hub_session() as session:
        stand_in.faults.listing = [{"sha": "none"}]
        hub = source.adapter(session, endpoint=stand_in.endpoint)
        with pytest.raises((ModelMissingError, HubUnreachableError)):
            await hub.resolve(REPO, source.branch)


@pytest.mark.parametrize("endpoint", ["ftp://x", "huggingface.co", "https://me:pw@x", "http://x?y"])
async def test_an_endpoint_that_is_no_address_is_refused(source: Source, endpoint: str) -> None:
    async with open_hub_session() as session:
        with pytest.raises(ValueError, match="is no address of a hub"):
            source.adapter(session, endpoint=endpoint)


@pytest.mark.parametrize("token", ["hf_x\n", "hf x", "hf_\r\nX-Y: z", "\u00fc"])
async def test_a_token_that_would_break_a_header_is_refused(source: Source, token: str) -> None:
    async with open_hub_session() as session:
        with pytest.raises(HubUnauthorizedError, match="one line of ASCII") as info:
            source.adapter(session, token=token)
    assert token not in str(info.value)


@pytest.mark.parametrize(("endpoint", "is_allowed"), [
    ("https://mirror.example", True),
    ("http://127.0.0.1:8080", True),
    ("http://[::1]:8080", True), ("http://localhost", True),
    ("http://mirror.example", False),
    ("http://10.0.0.1:8080", False),
])  # fmt: skip
async def test_a_token_crosses_no_network_in_clear(
    source: Source, endpoint: str, is_allowed: bool
) -> None:
    async with open_hub_session() as session:
        source.adapter(session, endpoint=endpoint)
        if is_allowed:
            source.adapter(session, endpoint=endpoint, token="hf_x")
            return
        with pytest.raises(HubUnauthorizedError, match="unencrypted"):
            source.adapter(session, endpoint=endpoint, token="hf_x")
