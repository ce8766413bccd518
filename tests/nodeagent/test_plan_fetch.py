"""The plan and the conditions of a replica whose model comes from a hub: fetched first, and never served in part."""

from dataclasses import replace
from typing import Any

import pytest

from models.hub.progress import FetchProgress
from nodeagent.actions import ReportRank
from nodeagent.plan import plan
from nodeagent.replicas.observation import (
    FetchState,
    NextStart,
    ObservedEngine,
    ObservedFetch,
    ObservedReplica,
)
from nodeagent.status import fetch_status, replica_conditions
from schemas.meta import find_condition
from schemas.replica import FetchStatus, RankStatus
from tests.support.nodeagent_plans import NOW, short, wanted
from tests.support.values import present

GIB = 2**30
PROGRESS = FetchProgress(
    phase="Downloading", total_bytes=4 * GIB, present_bytes=GIB, fetched_bytes=GIB, files=4, files_present=1,
    bytes_per_s=float(GIB // 64), eta_s=192.0, source="huggingface.co", waiting="",
)  # fmt: skip


def seen(state: FetchState, *, is_deleted: bool = False, **fields: Any) -> ObservedReplica:
    fetch = ObservedFetch(state=state, **fields)
    return ObservedReplica(replica=wanted(is_deleting=is_deleted), fetch=fetch)


RUNNING = seen(FetchState.RUNNING, progress=PROGRESS)
FAILED = seen(
    FetchState.FAILED,
    reason="HashMismatch",
    message="model.safetensors has other bytes",
    next_attempt=NextStart(in_s=20.0, at=NOW),
)
FULL = seen(FetchState.FAILED, reason="NoSpace", message="full")


@pytest.mark.parametrize(("observed", "actions", "after_s"), [
    pytest.param(seen(FetchState.NOT_STARTED), ["FetchModel"], 1.0, id="absent"),
    pytest.param(RUNNING, ["FetchModel"], 1.0, id="runs"),
    pytest.param(seen(FetchState.PRESENT), ["StartEngine"], 0.1, id="present"),
    pytest.param(FAILED, [], 20.0, id="backs off"),
    pytest.param(FULL, ["FetchModel"], 1.0, id="due"),
    pytest.param(replace(RUNNING, replica=wanted(is_deleting=True)), ["ReleaseFetch"], None, id="deleted in the middle"),
    pytest.param(ObservedReplica(replica=wanted()), ["StartEngine"], 0.1, id="a folder"),
])  # fmt: skip
def test_an_engine_starts_only_with_a_whole_model(
    observed: ObservedReplica, actions: list[str], after_s: float | None
) -> None:
    step = plan(observed)
    assert [short(action) for action in step.actions[:-1]] == actions
    assert step.requeue_after_s == after_s


DOWNLOADING = "25 % of 4.0 GiB from huggingface.co, 16.0 MiB/s, 3m12s left"
MISMATCH = "model.safetensors has other bytes; next attempt at 00:00:00 UTC"


@pytest.mark.parametrize(("observed", "type_", "reason", "message"), [
    (RUNNING, "Ready", "Downloading", DOWNLOADING),
    (RUNNING, "ModelPresent", "Downloading", DOWNLOADING),
    (seen(FetchState.RUNNING, progress=replace(PROGRESS, phase="Verifying")), "ModelPresent", "Verifying", ""),
    (FAILED, "Ready", "HashMismatch", MISMATCH),
])  # fmt: skip
def test_the_condition_has_the_progress_or_the_failure(
    observed: ObservedReplica, type_: str, reason: str, message: str
) -> None:
    condition = present(find_condition(replica_conditions(observed), type_))
    assert condition.reason == reason
    assert condition.message == (message or condition.message)


def test_the_report_has_the_progress_as_fields_and_changes_with_them() -> None:
    (report,) = [action for action in plan(RUNNING).actions if isinstance(action, ReportRank)]
    assert report.fetch == FetchStatus(
        node="a", phase="Downloading", present_bytes=GIB, total_bytes=4 * GIB,
        bytes_per_second=GIB // 64, eta_seconds=192, source="huggingface.co",
    )  # fmt: skip
    written = RankStatus(
        replica_uid="u1", node="a", conditions=report.conditions, fetch=report.fetch
    )
    again = replace(RUNNING, reported=written)
    assert not [action for action in plan(again).actions if isinstance(action, ReportRank)]
    listing = replace(PROGRESS, phase="Listing", total_bytes=0)
    others = (seen(FetchState.PRESENT), FAILED, seen(FetchState.RUNNING, progress=listing))
    assert [fetch_status(other) for other in others] == [None] * 3


def test_the_model_stays_present_while_its_engine_runs() -> None:
    """The reconciler would give the hub's token to a node without the condition."""
    before = replica_conditions(seen(FetchState.PRESENT, message="4.0 GiB in 3m"))
    engine = ObservedEngine(replica_uid="u1", is_running=True, state="Ready")
    reported = RankStatus(replica_uid="u1", node="a", conditions=before)
    running = ObservedReplica(replica=wanted(), engine=engine, reported=reported)
    condition = find_condition(replica_conditions(running), "ModelPresent")
    assert condition == find_condition(before, "ModelPresent")
    absent = replace(running, reported=RankStatus(replica_uid="u1", node="a"))
    assert find_condition(replica_conditions(absent), "ModelPresent") is None
