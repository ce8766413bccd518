"""The stand-in ModelScope is judged by the real SDK: it downloads from it, whole and unchanged."""

from pathlib import Path

import pytest

from tests.support.hub import REPO, tiny_files
from tests.support.modelscope import HAS_SDK, StandInModelScope, count_with_sdk, download_with_sdk

pytestmark = pytest.mark.skipif(
    not HAS_SDK, reason="the SDK of ModelScope is not installed: pip install modelscope-hub==0.5.1"
)


async def test_the_real_sdk_downloads_a_branch_from_another_port(tmp_path: Path) -> None:
    files = tiny_files()
    hub = StandInModelScope(repos={REPO: files}, token="ms-x")
    hub.faults.redirects_to_cdn = True
    async with hub.serve():
        found = await download_with_sdk(
            hub.endpoint, tmp_path, "master", MODELSCOPE_API_TOKEN="ms-x"
        )
    assert found == files
    (listing,) = hub.requests("GET", "/repo/files")
    assert listing.query == {"Revision": "master", "Recursive": "True"}
    asked = [one for one in hub.seen if one.path.endswith("/repo")]
    assert {one.query["FilePath"] for one in asked} == set(files)
    assert {one.query["Revision"] for one in asked} == {"master"}
    assert {request.port for request in hub.requests("GET", "/cdn/")} == {hub.cdn_port}


async def test_the_real_sdk_walks_the_folders_of_a_list_that_was_cut(tmp_path: Path) -> None:
    files = {f"{folder}/{number}.json": b"{}" for folder in "ab" for number in range(1600)}
    async with StandInModelScope(repos={REPO: files}).serve() as hub:
        found = await count_with_sdk(hub.endpoint, tmp_path, "v1")
    assert found == len(files) + 2
    lists = [request.query for request in hub.requests("GET", "/repo/files")]
    assert lists[:2] == [
        {"Revision": "v1", "Recursive": "True"},
        {"Revision": "v1", "Recursive": "False"},
    ]
    assert sorted(list_["Root"] for list_ in lists[2:]) == ["a", "b"]
