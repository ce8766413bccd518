"""Export of stored models: every byte checked, and a target that is whole or does not exist."""

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from models.model_store.export import ExportError, export_folder, export_tar
from models.model_store.store import ModelStore, StoredModel
from tests.support.hub import COMMIT, REPO, tiny_files
from tests.support.model_store import add_model, files_below

CLOCK = SystemClock()
FILES = {**tiny_files(), "empty.json": b""}
WEIGHTS = "model-00001-of-00002.safetensors"


def stored(root: Path) -> tuple[ModelStore, StoredModel]:
    store = ModelStore(root / "models", CLOCK)
    return store, add_model(store, REPO, COMMIT, FILES)


def damage(store: ModelStore, model: StoredModel) -> None:
    """Change one bit of the first weight file."""
    digest = next(file.sha256 for file in model.files if file.path == WEIGHTS)
    path = store.blobs / "sha256" / digest
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)


def test_a_folder_has_the_files_and_no_links(tmp_path: Path) -> None:
    store, model = stored(tmp_path)
    seen: list[int] = []
    export_folder(store, model, tmp_path / "out", seen.append)
    assert files_below(tmp_path / "out") == FILES
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert sum(seen) == model.size_bytes
    assert [path.name for path in tmp_path.iterdir()] in (["models", "out"], ["out", "models"])


def test_a_tar_file_has_one_folder_with_the_files(tmp_path: Path) -> None:
    store, model = stored(tmp_path)
    export_tar(store, model, tmp_path / "out.tar")
    with tarfile.open(tmp_path / "out.tar") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert files_below(tmp_path / "unpacked" / model.name) == FILES


def test_a_wrong_bit_ends_the_export_and_nothing_appears(tmp_path: Path) -> None:
    store, model = stored(tmp_path)
    damage(store, model)
    with pytest.raises(ExportError, match=f"is damaged: {WEIGHTS} was not exported"):
        export_folder(store, model, tmp_path / "out")
    with pytest.raises(ExportError, match="is damaged"):
        export_tar(store, model, tmp_path / "out.tar")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("out.tar*"))
    assert WEIGHTS not in files_below(tmp_path / "out.exporting")


def test_an_existing_target_is_never_touched(tmp_path: Path) -> None:
    store, model = stored(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ExportError, match="exists already"):
        export_folder(store, model, tmp_path / "out")
    with pytest.raises(ExportError, match="exists already"):
        export_tar(store, model, tmp_path / "out" / "mine")
    assert files_below(tmp_path / "out") == {"mine": b"x"}


def test_a_killed_export_goes_on_with_the_files_that_are_whole(tmp_path: Path) -> None:
    store, model = stored(tmp_path)
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.models.model_store.test_export import CLOCK, ModelStore, export_folder\n"
        "store, written = ModelStore(Path(sys.argv[1]), CLOCK), 0\n"
        "def report(count):\n"
        "    global written\n"
        "    written += count\n"
        "    if written > 320_000:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "export_folder(store, store.models()[0], Path(sys.argv[2]), report)\n"
    )
    words = [sys.executable, "-c", script, str(store.root), str(tmp_path / "out")]
    assert subprocess.run(words, check=False, timeout=60).returncode == -9
    making = tmp_path / "out.exporting"
    assert not (tmp_path / "out").exists()
    before = (making / WEIGHTS).stat().st_ino
    (making / "config.json").write_bytes(b"x" * len(FILES["config.json"]))  # as a cut copy
    (making / "other.bin").write_bytes(b"of another model")
    export_folder(store, model, tmp_path / "out")
    assert files_below(tmp_path / "out") == FILES
    path = tmp_path / "out" / WEIGHTS
    assert path.stat().st_ino == before
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(FILES[WEIGHTS]).digest()
