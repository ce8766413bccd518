"""Imports of GGUF files: the store has the whole model or nothing, whatever ends the import."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from machinery.clock import SystemClock
from models.model_files import inspect_model
from models.model_store.cache_import import ImportRefusedError
from models.model_store.gguf_import import import_gguf, repo_of
from models.model_store.import_places import models_in
from models.model_store.integrity import check_model
from models.model_store.store import ModelStore
from tests.support.gguf_files import write_gguf
from tests.support.mlx_models import module

CLOCK = SystemClock()
REPO = "fleet/Tiny-Q8_0"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    source = module("tests.support.tiny_model").make(folder / "source", arch="llama")
    return write_gguf(folder / "Tiny-Q8_0.gguf", source, "Q8_0")


def leftovers(store: ModelStore) -> list[Path]:
    return [*store.incoming.iterdir(), *store.fetches.iterdir()]


@pytest.mark.mlx
def test_a_file_becomes_a_pinned_model_of_the_fleet(path: Path, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store", CLOCK)
    (found,) = models_in(path)
    assert (found.name, found.problem) == ("Tiny-Q8_0.gguf", "")
    model = found.import_into(store)
    assert (model.repo, model.is_pinned) == (REPO, True)
    assert check_model(store, model.name, hashes=True) == ()
    assert inspect_model(model.folder).weights.half_bytes > 0
    assert leftovers(store) == []
    assert import_gguf(store, path, REPO).name == model.name


def test_names_of_files_become_names_of_repositories() -> None:
    names = {
        "Qwen3-8B-Q4_K_M.gguf": "fleet/Qwen3-8B-Q4_K_M",
        "a--b (1)..x.gguf": "fleet/a-b-1-x",
        "-..gguf": "fleet/",
    }
    assert {name: repo_of(Path("/x", name)) for name in names} == names


@pytest.mark.mlx
def test_what_cannot_be_read_leaves_nothing(path: Path, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store", CLOCK)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ImportRefusedError, match="ends behind the end of the file"):
        import_gguf(store, bad, REPO)
    with pytest.raises(ImportRefusedError, match="is no repository"):
        import_gguf(store, path, repo_of(Path("-..gguf")))
    store.reserve_bytes = 1 << 60
    with pytest.raises(ImportRefusedError, match=r"NoSpace: .*too little"):
        import_gguf(store, path, REPO)
    assert store.models() == ()
    assert leftovers(store) == []


def half_made(store: ModelStore) -> set[tuple[int, int]]:
    """Return what tells the configs apart that are written before the weights."""
    states = (path.stat() for path in store.incoming.glob("*.making/config.json"))
    return {(state.st_ino, state.st_mtime_ns) for state in states}


@pytest.mark.ci
@pytest.mark.mlx
@pytest.mark.timeout(400)
def test_a_killed_import_leaves_no_model_and_no_process(tmp_path: Path) -> None:
    source = module("tests.support.tiny_model").make(
        tmp_path / "source", arch="llama", hidden=512, heads=8, kv_heads=8, layers=40
    )
    large = write_gguf(tmp_path / "Tiny-Q8_0.gguf", source, "Q8_0")
    store = ModelStore(tmp_path / "store", CLOCK)
    words = [sys.executable, "-m", "fleetctl", "models", "import", str(large)]
    before: set[tuple[int, int]] = set()
    for signal_of in (signal.SIGKILL, signal.SIGINT):
        command = subprocess.Popen(
            [*words, "--models-dir", str(store.root)], start_new_session=True
        )
        while not (written := half_made(store) - before):
            assert command.poll() is None
            time.sleep(0.01)
        before |= written
        children = psutil.Process(command.pid).children()
        os.kill(command.pid, signal_of)
        assert command.wait() != 0
        gone, alive = psutil.wait_procs(children, timeout=20)
        assert (len(gone), alive) == (1, [])
        assert store.models() == ()
        assert [path.name for path in store.root.iterdir()] == ["blobs"]
    assert list(store.incoming.iterdir()) == []  # Ctrl-C cleans up, also after the kill before
    assert check_model(store, import_gguf(store, large, REPO).name, hashes=True) == ()
    assert leftovers(store) == []


@pytest.fixture
def full_store(tmp_path: Path) -> Iterator[ModelStore]:
    """A store that writes to a file system of 512 KiB, which its admission does not see."""
    store = ModelStore(tmp_path / "store", CLOCK)
    store.prepare()
    program = shutil.which("mount")
    words = (str(program), "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(store.incoming))
    if program is None or subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield store
    subprocess.run(["umount", str(store.incoming)], check=True)


@pytest.mark.ci
@pytest.mark.mlx
def test_a_disk_that_fills_up_says_so(path: Path, tmp_path: Path, full_store: ModelStore) -> None:
    source = module("tests.support.tiny_model").make(tmp_path / "wide", arch="llama", hidden=256)
    wide = write_gguf(tmp_path / "Wide.gguf", source, "Q8_0")
    with pytest.raises(ImportRefusedError, match="No space left on device"):
        import_gguf(full_store, wide, "fleet/Wide")
    assert full_store.models() == ()
    assert leftovers(full_store) == []
