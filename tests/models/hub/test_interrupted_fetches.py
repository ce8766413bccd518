"""Fetches in real processes that are killed, meet in one store, or fill the disk; and the real client as the judge."""

import asyncio
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from models.hub.connection import open_hub_session
from models.hub.errors import InsufficientDiskError
from models.hub.fetcher import FetchLimits, FetchRequest, ModelFetcher
from models.hub.file_selection import DEFAULT_PATTERNS, is_selected
from models.hub.huggingface import HuggingFaceHub
from models.model_store import admission
from models.model_store.integrity import check_model
from models.model_store.store import ModelStore
from tests.support.clock import SkippingClock
from tests.support.hub import COMMIT, REPO, StandInHub, tiny_files
from tests.support.model_store import files_below
from tests.support.waiting import until

FILES = tiny_files(weights=6_000_000)
WANTED = {path: content for path, content in FILES.items() if is_selected(path, DEFAULT_PATTERNS)}
WANTED_BYTES = sum(map(len, WANTED.values()))
PIECE = 1 << 18
# Bytes that the hub has sent and the kernel holds for the child when it is killed.
SOCKET_BYTES = 1 << 18


async def start_fetch(root: Path, endpoint: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.fetch_process", str(root), endpoint, str(PIECE)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def sent(stand_in: StandInHub, count: int) -> None:
    """Wait until the hub has sent so many bytes of files in all."""
    await until(lambda: stand_in.body_bytes >= count, every_s=0.001, what=f"{count} bytes")


async def finished(process: asyncio.subprocess.Process) -> str:
    out, err = await asyncio.wait_for(process.communicate(), timeout=60)
    assert process.returncode == 0, err.decode()
    return out.decode().strip()


@pytest.mark.ci
@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.full)])
async def test_each_kill_costs_at_most_one_piece_for_each_file(tmp_path: Path, kills: int) -> None:
    chance = random.Random(kills)
    stand_in = StandInHub(repos={REPO: FILES})
    stand_in.faults.bytes_per_s = 3_000_000
    async with stand_in.serve():
        for _ in range(kills):
            process = await start_fetch(tmp_path, stand_in.endpoint)
            goal = stand_in.body_bytes + chance.randint(20_000, WANTED_BYTES // (kills + 1))
            await sent(stand_in, goal)
            process.kill()
            await process.wait()
            assert ModelStore(tmp_path, SystemClock()).models() == ()
            assert list(tmp_path.iterdir()) == [tmp_path / "blobs"]
        stand_in.faults.bytes_per_s = None
        folder = Path(await finished(await start_fetch(tmp_path, stand_in.endpoint)))
    assert files_below(folder) == WANTED
    wasted = stand_in.body_bytes - WANTED_BYTES
    print(f"{kills} kills, {wasted / kills / 1024:.0f} KiB fetched twice for each")
    # Two large files are on their way at a time.
    assert wasted <= kills * 2 * (PIECE + SOCKET_BYTES)
    store = ModelStore(tmp_path, SystemClock())
    assert check_model(store, folder.name, hashes=True) == ()
    assert list(store.incoming.iterdir()) == []
    assert list(store.fetches.iterdir()) == []


@pytest.mark.ci
async def test_two_processes_fetch_one_model_once(tmp_path: Path) -> None:
    stand_in = StandInHub(repos={REPO: FILES})
    async with stand_in.serve():
        both = [await start_fetch(tmp_path, stand_in.endpoint) for _ in range(2)]
        folders = [await finished(process) for process in both]
    assert folders[0] == folders[1]
    assert stand_in.body_bytes == WANTED_BYTES


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB; only root on Linux can make one."""
    program = shutil.which("mount") or "/usr/bin/mount"
    made = subprocess.run(
        [program, "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


async def test_a_disk_that_fills_up_publishes_nothing_and_the_fetch_goes_on(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Admission is what usually prevents this: here another program takes the room after it.
    monkeypatch.setattr(admission, "disk_shortfall", lambda **_: 0)
    files = tiny_files(weights=2_000_000)
    async with StandInHub(repos={REPO: files}).serve() as stand_in, open_hub_session() as session:
        hub = HuggingFaceHub(session, endpoint=stand_in.endpoint)
        store = ModelStore(tiny, SkippingClock())
        fetcher = ModelFetcher(store, SkippingClock(), limits=FetchLimits(piece_bytes=PIECE))
        request = FetchRequest(repo=REPO, commit=COMMIT)
        other = tiny / "other"
        other.write_bytes(b"x" * 2_500_000)
        with pytest.raises(InsufficientDiskError, match="became full while"):
            await fetcher.fetch(hub, request)
        assert store.models() == ()
        other.unlink()
        model = await fetcher.fetch(hub, request)
        assert files_below(model.folder) == {p: files[p] for p in WANTED}
