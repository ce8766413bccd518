"""The saved state: its content, and the files that are rejected."""

import stat
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.state import persistence
from gateway.state.persistence import GatewaySnapshot, KnownObjects, SnapshotError, SnapshotFile
from schemas.deployment import ModelDeploymentStatus
from schemas.meta import Condition, ConditionStatus
from schemas.records import ApiKey
from tests.support.gateway_world import deployment, endpoint, route

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FULL = GatewaySnapshot(
    saved_at=NOW,
    known=KnownObjects(
        deployments={"m": deployment("m", "fast", replicas=2)},
        statuses={
            "m": ModelDeploymentStatus(
                conditions=(
                    Condition(type="Placed", status=ConditionStatus.FALSE, reason="NoNodes"),
                )
            )
        },
        routes={"r": route("r", "public", m=1)},
        endpoints={"e": (endpoint("m-0", "m", "http://127.0.0.1:4100"), 7)},
        sites={"mac-1": "berlin"},
    ),
    gateways=5,
    keys={"ci": ApiKey(name="ci", hash="0" * 64, created=NOW, models=("m",))},
)
EMPTY = GatewaySnapshot(saved_at=NOW, known=KnownObjects())


@pytest.mark.parametrize("kept", [FULL, EMPTY], ids=["full", "empty"])
def test_what_is_kept_comes_back(kept: GatewaySnapshot, tmp_path: Path) -> None:
    file = SnapshotFile(tmp_path / "new")
    assert file.read() is None
    file.save(kept)
    assert file.read() == kept
    (path,) = (tmp_path / "new").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def changed(**more: object) -> bytes:
    return orjson.dumps({**orjson.loads(persistence.encode(FULL)), **more})


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "garbled"),
        (b"\xff\x00", "garbled"),
        (b"[]", "garbled"),
        (b"{}", "garbled"),
        (persistence.encode(FULL)[:-40], "garbled"),
        (changed(format=2), "it has format 2, and this release reads 1"),
        (changed(format=0), "it has format 0"),
        (changed(savedAt="soon"), "garbled"),
        (changed(endpoints={"e": ["seven", "{}"]}), "e: "),
        (changed(deployments={"m": '{"storedVersion":99}'}), "newer"),
        (changed(keys={"ci": '{"storedVersion":1,"name":"ci"}'}), "ci: "),
        (changed(routes=[]), "garbled"),
    ],
)
def test_other_files_are_ignored_and_logged(
    raw: bytes, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "known.json").write_bytes(raw)
    assert SnapshotFile(tmp_path).read() is None
    (record,) = caplog.records
    assert record.message == "cannot use the saved fleet state; starting without it"
    assert why in record.why  # type: ignore[attr-defined]  # extra


@given(st.data())
def test_no_damage_is_more_than_a_refusal(data: st.DataObject) -> None:
    raw = bytearray(persistence.encode(FULL))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        snapshot = persistence.decode(bytes(raw))
    except SnapshotError:
        return
    assert isinstance(snapshot, GatewaySnapshot)


def test_an_unwritable_disk_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    file = SnapshotFile(tmp_path / "file")
    file.save(FULL)
    file.save(FULL)
    (record,) = caplog.records
    assert record.message == "cannot save the fleet state for a start without etcd"
