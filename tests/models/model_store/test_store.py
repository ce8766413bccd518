"""The store: contents by digest, folders of relative links, pins, loads and removal."""

import json
from pathlib import Path

import pytest

from models.hub.digests import BlobDigest
from models.model_store.admission import disk_shortfall, is_reserved, reserve
from models.model_store.store import ModelStore
from tests.support.hub import COMMIT
from tests.support.model_store import ShiftedClock, add_model, files_below, stored_contents
from tests.support.values import present

FILES = {"config.json": b"{}", "sub/model.safetensors": b"weights", "tokenizer.json": b"[]"}
OTHER = "b" * 40
GIB = 1 << 30


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models", ShiftedClock())


def test_a_model_is_a_folder_of_relative_links(store: ModelStore, tmp_path: Path) -> None:
    model = add_model(store, "a/b", COMMIT, FILES)
    assert model.name == "a--b@1f2e3d4c5b6a"
    assert files_below(model.folder) == FILES
    assert model.size_bytes == sum(map(len, FILES.values()))
    assert store.find("a/b", COMMIT) == model
    assert store.find_by_name(model.name) == model
    # The store can be moved with its folder.
    store.root.rename(tmp_path / "moved")
    moved = ModelStore(tmp_path / "moved", ShiftedClock())
    assert files_below(moved.models()[0].folder) == FILES


def test_contents_are_read_only_and_kept_once(store: ModelStore) -> None:
    add_model(store, "a/b", COMMIT, FILES)
    add_model(store, "a/c", COMMIT, FILES)
    contents = stored_contents(store)
    assert len(contents) == len(FILES)
    assert all(
        store.blob_path(BlobDigest("sha256", c)).stat().st_mode & 0o222 == 0 for c in contents
    )


def test_model_that_lost_a_file_is_no_model_until_it_is_published_again(store: ModelStore) -> None:
    model = add_model(store, "a/b", COMMIT, FILES)
    with store.locked():
        store.drop_blob(model.files[0].sha256)
    assert store.models() == ()
    assert store.record_load(model.name) is False
    assert files_below(add_model(store, "a/b", COMMIT, FILES).folder) == FILES


def test_removing_a_model_keeps_what_others_have(store: ModelStore) -> None:
    model = add_model(store, "a/b", COMMIT, FILES)
    two = add_model(store, "a/b", OTHER, {**FILES, "config.json": b"{ }"})
    assert store.pin(model.name)
    assert store.remove(model.name) == 2
    assert store.models() == (two,)
    assert files_below(two.folder)["config.json"] == b"{ }"
    assert store.remove(two.name) > 0
    assert stored_contents(store) == {}
    assert list((store.blobs / "pins").iterdir()) == []


def test_pins_and_loads_are_remembered(store: ModelStore) -> None:
    name = add_model(store, "a/b", COMMIT, FILES).name
    assert store.pin(name)
    assert store.record_load(name)
    model = store.models()[0]
    assert model.is_pinned
    assert model.loaded_at is not None
    assert model.used_at >= model.loaded_at
    assert store.unpin(name)
    assert not store.unpin(name)
    assert not store.pin("no--model@1f2e3d4c5b6a")


def record(repo: str, path: str) -> str:
    file = {"path": path, "size": 1, "sha256": "0" * 64}
    head = {"repo": repo, "commit": COMMIT, "patterns": [], "fetched_at": "2026-01-01T00:00:00Z"}
    return json.dumps({**head, "files": [file]})


@pytest.mark.parametrize(
    "text", ["", "{}", record("a/b", "../../x.json"), record("other/b", "x.json")]
)
def test_a_damaged_record_is_no_model(store: ModelStore, text: str) -> None:
    model = add_model(store, "a/b", COMMIT, FILES)
    (store.blobs / "manifests" / f"{model.name}.json").write_text(text)
    assert store.models() == ()


@pytest.mark.parametrize(("free", "reserved", "missing", "shortfall"), [
    pytest.param(0, 0, 0, 0, id="nothing-is-missing"),
    pytest.param(2 * GIB, 0, GIB, 0, id="just-enough"),
    pytest.param(2 * GIB - 1, 0, GIB, 1, id="a-byte-too-little"),
    pytest.param(105 * GIB, 0, 100 * GIB, 0, id="five-percent"),
    pytest.param(105 * GIB, 7 * GIB, 100 * GIB, 7 * GIB, id="reserve"),
])  # fmt: skip
def test_admission_leaves_a_margin(free: int, reserved: int, missing: int, shortfall: int) -> None:
    found = disk_shortfall(free_bytes=free, reserve_bytes=reserved, missing_bytes=missing)
    assert found == shortfall


def test_a_reservation_excludes_the_same_model_and_ends(store: ModelStore) -> None:
    wanted = {BlobDigest("sha256", "0" * 64): 5}
    held = present(reserve(store, "a--b@1f2e3d4c5b6a", wanted))
    assert is_reserved(store, "a--b@1f2e3d4c5b6a")
    assert reserve(store, "a--b@1f2e3d4c5b6a", wanted) is None
    other = present(reserve(store, "a--c@1f2e3d4c5b6a", wanted))
    held.release()
    assert not is_reserved(store, "a--b@1f2e3d4c5b6a")
    other.release()
    assert list(store.fetches.iterdir()) == []


def test_a_commit_never_takes_the_folder_of_another(store: ModelStore) -> None:
    model = add_model(store, "a/b", COMMIT, {"config.json": b"{}"})
    twin = COMMIT[:12] + "0" * 28
    with pytest.raises(FileExistsError, match=f"holds a/b@{COMMIT}; use that"):
        add_model(store, "a/b", twin, {"config.json": b"[]"})
    # As on a disk that ignores case, where both names are one file.
    record = store.blobs / "manifests" / f"{model.name}.json"
    record.rename(record.with_name("A--b@1f2e3d4c5b6a.json"))
    model.folder.rename(store.root / "A--b@1f2e3d4c5b6a")
    with pytest.raises(FileExistsError, match="holds a/b@"):
        add_model(store, "A/b", COMMIT, {"config.json": b"{}"})
