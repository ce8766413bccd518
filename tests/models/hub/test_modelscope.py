"""The adapter to ModelScope beyond what all adapters have in common: commits from contents, and lists that are cut."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from models.hub.connection import open_hub_session
from models.hub.errors import ListingRefusedError, ModelGatedError, ModelMissingError
from models.hub.model_hub import contents_version, is_commit
from models.hub.modelscope import ModelScopeHub
from tests.support.hub import REPO, tiny_files
from tests.support.modelscope import StandInModelScope

FILES = tiny_files()


@asynccontextmanager
async def connected(
    files: dict[str, bytes] = FILES, *, token: str = "", branch: str = "master"
) -> AsyncIterator[tuple[StandInModelScope, ModelScopeHub]]:
    stand_in = StandInModelScope(repos={REPO: dict(files)})
    async with stand_in.serve(), open_hub_session() as session:
        yield (
            stand_in,
            ModelScopeHub(session, endpoint=stand_in.endpoint, token=token, branch=branch),
        )


async def test_a_commit_is_the_digest_of_the_files_that_are_fetched() -> None:
    async with connected() as (stand_in, hub):
        commit = await hub.resolve(REPO, "master")
        assert is_commit(commit)
        digests = {file.path: file.digest for file in await hub.files(REPO, commit)}
        not_fetched = {"README.md", "modeling_tiny.py"}
        assert set(FILES) - not_fetched < set(digests)
        chosen = {path: digest for path, digest in digests.items() if path not in not_fetched}
        assert commit == contents_version(chosen)
        stand_in.repos[REPO]["README.md"] = b"another text"
        assert await hub.resolve(REPO, "master") == commit
        assert len(await hub.files(REPO, commit)) == len(FILES)


async def test_a_branch_that_moved_has_the_pinned_files_no_more() -> None:
    async with connected() as (stand_in, hub):
        commit = await hub.resolve(REPO, "master")
        stand_in.repos[REPO]["config.json"] = b"{}"
        with pytest.raises(
            ModelMissingError, match=r"has other files in master of .* rollout refresh"
        ):
            await hub.files(REPO, commit)
        assert await hub.resolve(REPO, "master") != commit


async def test_a_list_that_the_hub_cut_is_read_folder_by_folder() -> None:
    many = {f"{folder}/{number}.json": b"{}" for folder in "ab" for number in range(1600)}
    async with connected({**FILES, **many}) as (stand_in, hub):
        commit = await hub.resolve(REPO, "master")
        assert len(await hub.files(REPO, commit)) == len(FILES) + len(many)
        roots = [one.query.get("Root", "") for one in stand_in.seen]
    assert sorted(roots[: len(roots) // 2]) == ["", "", "a", "b", "templates"]


async def test_a_folder_with_more_files_than_the_hub_lists_is_refused() -> None:
    many = {f"{number}.json": b"{}" for number in range(3001)}
    async with connected(many) as (_, hub):
        with pytest.raises(ListingRefusedError, match="at most 3000 entries of a folder"):
            await hub.resolve(REPO, "master")


async def test_a_file_without_a_digest_is_refused_unless_it_is_not_fetched() -> None:
    readme = {"Path": "README.md", "Type": "blob", "Size": 3}
    config = {
        "Path": "config.json",
        "Type": "blob",
        "Size": 2,
        "Sha256": hashlib.sha256(b"{}").hexdigest(),
    }
    async with connected() as (stand_in, hub):
        stand_in.faults.listing = [readme, config]
        commit = await hub.resolve(REPO, "master")
        assert [file.path for file in await hub.files(REPO, commit)] == ["config.json"]
        for digest in ("", "../../etc/passwd"):
            stand_in.faults.listing = [{**config, "Sha256": digest}]
            with pytest.raises(ListingRefusedError, match=r"lists 'config\.json' of .* badly"):
                await hub.resolve(REPO, "master")


async def test_a_token_without_access_to_a_repository_is_told_apart() -> None:
    async with connected(token="ms-x") as (stand_in, hub):
        stand_in.faults.status = 403
        with pytest.raises(ModelGatedError, match="apply on its page"):
            await hub.resolve(REPO, "master")
