"""Checks of models: what a hub refused, and files that interrupted downloads left on this machine."""

import fcntl
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fleetctl.doctor.observe_models import (
    delete_partial_file,
    find_partial_files,
    model_folders,
)
from insight.doctor.model_checks import PARTIAL_FILES, PartialFile, check_models
from schemas.meta import ObjectMeta
from schemas.node import ModelReport, Node
from tests.support.reconciler_agents import node_status

NOW = datetime(2026, 11, 22, tzinfo=UTC)
DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("reason", "level"),
    [
        ("", None),
        ("ModelNotFound", None),  # the folder is on other nodes
        ("Gated", "FAIL"),
        ("Unauthorized", "FAIL"),
        ("HashMismatch", "FAIL"),
        ("NoSpace", "FAIL"),
        ("RateLimited", "WARN"),
        ("SourceUnreachable", "WARN"),
    ],
)
def test_a_refusal_of_the_hub_is_told_with_its_words(reason: str, level: str | None) -> None:
    report = ModelReport(path="org/model", reason=reason, message="the hub says no")
    status = node_status("mac-1").model_copy(update={"models": (report,)})
    models = list(check_models([Node(metadata=ObjectMeta(name="mac-1"), status=status)], ()))
    assert [model.level for model in models] == ([] if level is None else [level])
    for model in models:
        assert model.node == "mac-1"
        assert model.message == f"model org/model is not there ({reason}): the hub says no"
        assert model.advice


def test_leftovers_are_counted_and_have_a_fix() -> None:
    files = tuple(PartialFile(path=f"/m/{n}.part", size_bytes=2**30) for n in range(4))
    (finding,) = check_models((), files)
    assert finding.message == (
        "4 files of interrupted downloads with 4.0 GiB: /m/0.part, /m/1.part, /m/2.part and 1 more"
    )
    assert finding.fix == PARTIAL_FILES


def touch(path: Path, age_s: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 10)
    at = NOW.timestamp() - age_s
    os.utime(path, (at, at))
    return path


def test_only_files_that_nothing_continues_are_leftovers(tmp_path: Path) -> None:
    old, new = 2 * DAY_S, 0.5 * DAY_S
    part = touch(tmp_path / "incoming" / "sha256-aa.part", old)
    incomplete = touch(tmp_path / "models--a" / "blobs" / "bb.incomplete", old)
    touch(tmp_path / "incoming" / "sha256-cc.part", old)
    touch(tmp_path / "incoming" / "sha256-cc.journal", old)
    touch(tmp_path / "incoming" / "sha256-dd.part", new)
    touch(tmp_path / "model.safetensors", old)
    (tmp_path / "link.part").symlink_to(tmp_path / "model.safetensors")
    locked = touch(tmp_path / "incoming" / "sha256-ee.part", old)
    with locked.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        partial_files = find_partial_files((tmp_path,), NOW)
    assert {partial_file.path for partial_file in partial_files} == {str(part), str(incomplete)}

    assert delete_partial_file(partial_files[0], NOW)
    assert not delete_partial_file(partial_files[0], NOW)
    assert len(find_partial_files((tmp_path,), NOW)) == 2  # the lock of the fourth is gone
    assert find_partial_files((tmp_path / "nowhere",), NOW) == ()


def test_the_folders_are_those_of_the_fleets_processes(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    command = ["python", "-m", "nodeagent", "--models-dir", "/models", "--name", "mac-1"]
    record = {"pid": 7, "start": "x", "command": command}
    for name in ("mac-1", "mac-2"):
        (tmp_path / "run" / f"{name}.pid").write_text(json.dumps(record))
    (tmp_path / "run" / "broken.pid").write_text("{")
    assert model_folders(tmp_path) == (Path("/models"),)
    assert model_folders(None) == ()
