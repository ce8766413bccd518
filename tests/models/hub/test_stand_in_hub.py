"""The stand-in hub is judged by the real huggingface_hub: it downloads from it, whole and unchanged."""

import asyncio
import sys
from pathlib import Path

from machinery.environment import environment_without_secrets
from tests.support.hub import COMMIT, REPO, StandInHub, tiny_files

# One process for all downloads: the import takes a second.
_CLIENT = """
import sys
from huggingface_hub import snapshot_download

repo, folder, *revisions = sys.argv[1:]
for number, revision in enumerate(revisions):
    print(snapshot_download(repo, revision=revision, cache_dir=f"{folder}/{number}"))
"""


async def run_client(endpoint: str, folder: Path, *revisions: str, **variables: str) -> list[Path]:
    environment = environment_without_secrets() | {
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(folder / "home"),
        **variables,
    }
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CLIENT, REPO, str(folder), *revisions),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(child.communicate(), timeout=60)
    assert child.returncode == 0, err.decode()
    return [Path(line) for line in out.decode().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


async def test_the_real_client_downloads_plain_and_pinned_then_offline(tmp_path: Path) -> None:
    files = tiny_files()
    async with StandInHub(repos={REPO: files}, token="hf_x").serve() as hub:
        found = await run_client(hub.endpoint, tmp_path, "main", COMMIT, HF_TOKEN="hf_x")
        assert [contents(folder) for folder in found] == [files, files]
        assert len(hub.requests("GET", "/revision/")) == 1  # a commit needs none
    (offline,) = await run_client(
        "http://127.0.0.1:9", tmp_path, "main", HF_HUB_OFFLINE="1", OPENBLAS_NUM_THREADS="1"
    )
    assert contents(offline) == files
    assert offline.name == COMMIT


async def test_the_real_client_follows_to_the_other_port_and_pages(tmp_path: Path) -> None:
    files = tiny_files()
    hub = StandInHub(repos={REPO: files}, token="hf_x")
    hub.faults.redirects_to_cdn = hub.faults.gzips_json = True
    hub.faults.page_size = 2
    async with hub.serve():
        (found,) = await run_client(hub.endpoint, tmp_path, "main", HF_TOKEN="hf_x")
    assert contents(found) == files
    from_cdn = hub.requests("GET", "/cdn/")
    assert {one.port for one in from_cdn} == {hub.cdn_port}
    assert not any(one.has_token for one in from_cdn)
