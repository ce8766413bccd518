"""Import of a cache that the real huggingface_hub filled: hashed, shared, and refused where it is damaged."""

from pathlib import Path

import pytest

from machinery.clock import SystemClock
from models.hub.file_selection import DEFAULT_PATTERNS, is_selected
from models.model_store.cache_import import (
    ImportRefusedError,
    find_snapshots,
    import_snapshot,
    share_file,
)
from models.model_store.integrity import check_model
from models.model_store.store import ModelStore
from models.partial_model import AbsentFile, PartialMark
from tests.support.hub import COMMIT, REPO, StandInHub, run_hub_client, tiny_files
from tests.support.model_store import add_model, files_below, stored_contents

FILES = tiny_files()
WANTED = {path: content for path, content in FILES.items() if is_selected(path, DEFAULT_PATTERNS)}


@pytest.fixture(scope="module")
async def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("client")
    async with StandInHub(repos={REPO: FILES}).serve() as hub:
        await run_hub_client(hub.endpoint, folder, "main")
    return folder / "0"


async def test_a_cache_of_the_real_client_is_imported_whole(cache: Path, tmp_path: Path) -> None:
    store = ModelStore(tmp_path, SystemClock())
    (snapshot,) = find_snapshots(cache)
    assert (snapshot.repo, snapshot.commit) == (REPO, COMMIT)
    model = import_snapshot(store, snapshot)
    assert files_below(model.folder) == WANTED
    assert check_model(store, model.name, hashes=True) == ()
    assert import_snapshot(store, snapshot).files == model.files
    assert list(store.incoming.iterdir()) == []
    # Removing the import leaves the cache as it was.
    store.remove(model.name)
    assert stored_contents(store) == {}
    assert files_below(snapshot.folder) == FILES


async def test_an_import_completes_a_part_of_a_model(cache: Path, tmp_path: Path) -> None:
    store = ModelStore(tmp_path, SystemClock())
    (snapshot,) = find_snapshots(cache)
    left_out = "model-00001-of-00002.safetensors"
    part = add_model(
        store,
        REPO,
        COMMIT,
        {path: content for path, content in WANTED.items() if path != left_out},
        partial=PartialMark(
            absent={left_out: AbsentFile(size=len(WANTED[left_out]), sha256="0" * 64)}, headers=""
        ),
    )
    assert part.is_partial
    model = import_snapshot(store, snapshot)
    assert not model.is_partial
    assert files_below(model.folder) == WANTED
    assert check_model(store, model.name, hashes=True) == ()


async def test_a_damaged_file_of_a_cache_is_refused(cache: Path, tmp_path: Path) -> None:
    (snapshot,) = find_snapshots(cache)
    source = (snapshot.folder / "model-00001-of-00002.safetensors").resolve()
    content = source.read_bytes()
    source.write_bytes(b"x" + content[1:])
    try:
        store = ModelStore(tmp_path, SystemClock())
        with pytest.raises(ImportRefusedError, match="is damaged: its content is sha256"):
            import_snapshot(store, snapshot)
        assert store.models() == ()
    finally:
        source.write_bytes(content)


def test_an_unfinished_snapshot_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--a--b" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").symlink_to("../../blobs/gone")
    (snapshot,) = find_snapshots(tmp_path / "hub")
    store = ModelStore(tmp_path / "store", SystemClock())
    with pytest.raises(ImportRefusedError, match="is a link to nothing"):
        import_snapshot(store, snapshot)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ImportRefusedError, match="was not finished"):
        import_snapshot(store, snapshot)


def test_sharing_copies_where_the_disk_cannot_link(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs two file systems")
    source = other / f"mlx-fleet-{tmp_path.name}"
    source.write_bytes(b"abc")
    try:
        share_file(source, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == b"abc"
    finally:
        source.unlink()


def _lm_studio_folder(root: Path, name: str, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        target = root / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return root


def test_a_folder_of_lm_studio_is_imported_whole(tmp_path: Path) -> None:
    cache = _lm_studio_folder(tmp_path / "lm-studio", REPO, FILES)
    store = ModelStore(tmp_path / "store", SystemClock())
    (snapshot,) = find_snapshots(cache)
    assert (snapshot.repo, snapshot.commit) == (REPO, "")
    model = import_snapshot(store, snapshot)
    assert files_below(model.folder) == WANTED
    assert check_model(store, model.name, hashes=True) == ()
    assert import_snapshot(store, snapshot).name == model.name
    assert files_below(snapshot.folder) == FILES


def test_other_contents_of_a_folder_of_lm_studio_are_another_model(tmp_path: Path) -> None:
    cache = _lm_studio_folder(tmp_path / "lm-studio", REPO, FILES)
    store = ModelStore(tmp_path / "store", SystemClock())
    (snapshot,) = find_snapshots(cache)
    before = import_snapshot(store, snapshot)
    config = snapshot.folder / "config.json"
    config.unlink()  # a hard link of the store
    config.write_bytes(b'{"model_type": "qwen3"}\n')
    assert import_snapshot(store, snapshot).name != before.name
