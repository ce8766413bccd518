"""The check of stored models: every kind of damage is found, and only what is damaged is fetched again."""

from pathlib import Path

import pytest

from machinery.clock import SystemClock
from models.hub.digests import BlobDigest
from models.model_store.integrity import check_model, discard_defects
from models.model_store.store import ModelStore, StoredModel
from tests.support.hub import COMMIT
from tests.support.model_store import add_model, stored_contents

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path, SystemClock())


@pytest.fixture
def model(store: ModelStore) -> StoredModel:
    return add_model(store, "a/b", COMMIT, FILES)


def weights(store: ModelStore, model: StoredModel) -> Path:
    (digest,) = (file.sha256 for file in model.files if file.path == "model.safetensors")
    return store.blob_path(BlobDigest("sha256", digest))


def rot(path: Path, content: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(content)


def test_a_sound_model_has_no_defects(store: ModelStore, model: StoredModel) -> None:
    assert check_model(store, model.name, hashes=True) == ()


def test_a_changed_byte_is_found_by_hashing_only(store: ModelStore, model: StoredModel) -> None:
    rot(weights(store, model), b"weightz")
    assert check_model(store, model.name) == ()
    (defect,) = check_model(store, model.name, hashes=True)
    assert (defect.path, defect.defect) == ("model.safetensors", "WrongContent")


def test_missing_short_and_replaced_files_are_found(store: ModelStore, model: StoredModel) -> None:
    path = weights(store, model)
    rot(path, b"short")
    assert [defect.defect for defect in check_model(store, model.name)] == ["WrongSize"]
    path.unlink()
    assert [defect.defect for defect in check_model(store, model.name)] == ["Missing"]
    link = model.folder / "config.json"
    link.unlink()
    link.write_bytes(b"{}")
    assert [defect.defect for defect in check_model(store, model.name)] == [
        "WrongContent",
        "Missing",
    ]


def test_only_damaged_contents_are_discarded(store: ModelStore, model: StoredModel) -> None:
    twin = add_model(store, "a/twin", COMMIT, {**FILES, "more.json": b"[]"})
    other = add_model(store, "a/other", COMMIT, {"config.json": b"{}"})
    rot(weights(store, model), b"weightz")
    defects = check_model(store, model.name, hashes=True)
    assert discard_defects(store, defects) == (model.name, twin.name)
    assert store.models() == (other,)
    assert len(stored_contents(store)) == 2  # config.json and more.json
    add_model(store, "a/b", COMMIT, FILES)
    assert check_model(store, model.name, hashes=True) == ()
