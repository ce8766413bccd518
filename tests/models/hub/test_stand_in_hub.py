"""The stand-in hub is judged by the real huggingface_hub: it downloads from it, whole and unchanged."""

from pathlib import Path

import pytest

from tests.support.hub import COMMIT, REPO, StandInHub, run_hub_client, tiny_files
from tests.support.model_store import files_below


async def test_the_real_client_downloads_plain_and_pinned_then_offline(tmp_path: Path) -> None:
    files = tiny_files()
    async with StandInHub(repos={REPO: files}, token="hf_x").serve() as hub:
        paths = await run_hub_client(hub.endpoint, tmp_path, "main", COMMIT, HF_TOKEN="hf_x")
        assert [files_below(folder) for folder in paths] == [files, files]
        assert len(hub.requests("GET", "/revision/")) == 1  # a commit needs none
    (offline,) = await run_hub_client(
        "http://127.0.0.1:9", tmp_path, "main", HF_HUB_OFFLINE="1", OPENBLAS_NUM_THREADS="1"
    )
    assert files_below(offline) == files
    assert offline.name == COMMIT


@pytest.mark.ci
async def test_the_real_client_follows_to_the_other_port_and_pages(tmp_path: Path) -> None:
    files = tiny_files()
    hub = StandInHub(repos={REPO: files}, token="hf_x")
    hub.faults.redirects_to_cdn = hub.faults.gzips_json = True
    hub.faults.page_size = 2
    async with hub.serve():
        (path,) = await run_hub_client(hub.endpoint, tmp_path, "main", HF_TOKEN="hf_x")
    assert files_below(path) == files
    from_cdn = hub.requests("GET", "/cdn/")
    assert {one.port for one in from_cdn} == {hub.cdn_port}
    assert not any(one.has_token for one in from_cdn)
