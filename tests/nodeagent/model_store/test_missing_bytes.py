"""Bytes of hub models that a node lacks, as it reports them for placement."""

from hashlib import sha256
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from models.model_store import admission
from models.model_store.store import ModelStore
from nodeagent.model_store.missing_bytes import with_missing_bytes
from schemas.deployment import HubReference
from schemas.model_snapshot import LargeFile, ModelSnapshot, SnapshotWeights
from schemas.node import ModelReport
from tests.support.clock import FakeClock
from tests.support.model_store import add_model
from tests.support.world import GEOMETRY

REPO, NEW, OLD = "org/tiny", "ab" * 20, "cd" * 20
MIB = 1 << 20
WEIGHTS = {f"model-{at}.safetensors": bytes([at]) * MIB for at in range(4)}
SMALL = {"config.json": b"{}"}
WHOLE = 4 * MIB + 2


def snapshot_of(files: dict[str, bytes], *, patterns: tuple[str, ...] = ("*",)) -> ModelSnapshot:
    large = [content for content in files.values() if len(content) >= MIB]
    return ModelSnapshot(
        deployment="tiny",
        uid="u",
        source=HubReference(repo=REPO, files=patterns),
        commit=NEW,
        resolved_at=FakeClock().now(),
        files=len(files),
        size_bytes=sum(map(len, files.values())),
        large_files=tuple(
            LargeFile(digest=f"sha256:{sha256(one).hexdigest()}", size_bytes=len(one))
            for one in large
        ),
        config="{}",
        weights=SnapshotWeights(
            total_bytes=0, half_bytes=0, replicated_bytes=0, replicated_half_bytes=0, parameters=0
        ),
    )


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path, SystemClock())


def missing(store: ModelStore, snapshot: ModelSnapshot) -> int:
    report = ModelReport(path=snapshot.folder, geometry=GEOMETRY)
    (model_report,) = with_missing_bytes([report], {snapshot.folder: snapshot}, store)
    return model_report.missing_bytes


def test_a_model_that_is_not_here_is_missing_as_a_whole(store: ModelStore) -> None:
    assert missing(store, snapshot_of({**WEIGHTS, **SMALL})) == WHOLE


def test_a_model_that_is_whole_lacks_nothing(store: ModelStore) -> None:
    snapshot = snapshot_of({**WEIGHTS, **SMALL})
    add_model(store, REPO, NEW, {**WEIGHTS, **SMALL})
    assert missing(store, snapshot) == 0
    # Files that another choice of patterns adds are still to be fetched.
    others = snapshot_of({**WEIGHTS, **SMALL}, patterns=("*", "*.bin"))
    assert missing(store, others) > 0


def test_weights_that_another_commit_brought_are_not_missing(store: ModelStore) -> None:
    """A commit that corrects the README costs a few bytes."""
    add_model(store, REPO, OLD, {**WEIGHTS, "config.json": b"{ }"})
    assert missing(store, snapshot_of({**WEIGHTS, **SMALL})) == len(SMALL["config.json"])


def test_the_number_falls_in_coarse_steps(store: ModelStore) -> None:
    snapshot = snapshot_of({**WEIGHTS, **SMALL})
    seen = set()
    names = list(WEIGHTS)
    for count in range(len(names)):
        add_model(store, REPO, OLD, {name: WEIGHTS[name] for name in names[: count + 1]})
        seen.add(missing(store, snapshot))
    assert seen == {4 * MIB, 2 * MIB, 2}


def test_models_in_folders_lack_nothing(store: ModelStore) -> None:
    report = ModelReport(path="qwen", geometry=GEOMETRY)
    assert with_missing_bytes([report], {}, store) == (report,)
    assert admission.snapshot_missing_bytes(store, snapshot_of(SMALL)) == 2
