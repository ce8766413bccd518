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

GIB = 2**30
PROGRESS = FetchProgress(
    phase="Downloading",
    total_bytes=4 * GIB,
    present_bytes=GIB,
    fetched_bytes=GIB,
    files=4,
    files_present=1,
    bytes_per_s=float(GIB // 64),
    eta_s=192.0,
    source="huggingface.co",
    waiting="",
)


def seen(state: FetchState, *, is_deleted: bool = False, **fields: Any) -> ObservedReplica:
    fetch = ObservedFetch(state=state, **fields)
    return ObservedReplica(replica=wanted(is_deleting=is_deleted), fetch=fetch)


FAILED = seen(
    FetchState.FAILED,
    reason="HashMismatch",
    message="model.safetensors has other bytes",
    next_attempt=NextStart(in_s=20.0, at=NOW),
)


@pytest.mark.parametrize(
    ("observed", "actions", "after_s"),
    [
        pytest.param(seen(FetchState.NOT_STARTED), ["FetchModel"], 1.0, id="absent"),
        pytest.param(seen(FetchState.RUNNING, progress=PROGRESS), ["FetchModel"], 1.0, id="runs"),
        pytest.param(seen(FetchState.PRESENT), ["StartEngine"], 0.1, id="present"),
        pytest.param(FAILED, [], 20.0, id="backs off"),
        pytest.param(
            seen(FetchState.FAILED, reason="NoSpace", message="full"), ["FetchModel"], 1.0, id="due"
        ),
        pytest.param(
            seen(FetchState.RUNNING, progress=PROGRESS, is_deleted=True),
            ["ReleaseFetch"],
            None,
            id="deleted in the middle",
        ),
        pytest.param(ObservedReplica(replica=wanted()), ["StartEngine"], 0.1, id="a folder"),
    ],
)
def test_an_engine_starts_only_with_a_whole_model(
    observed: ObservedReplica, actions: list[str], after_s: float | None
) -> None:
    action_plan = plan(observed)
    assert [short(action) for action in action_plan.actions[:-1]] == actions
    assert action_plan.requeue_after_s == after_s


def test_the_condition_has_share_hub_rate_and_time_left() -> None:
    running = seen(FetchState.RUNNING, progress=PROGRESS)
    for type_ in ("Ready", "ModelPresent"):
        condition = find_condition(replica_conditions(running), type_)
        assert condition is not None
        assert (condition.reason, condition.message) == (
            "Downloading",
            "25 % of 4.0 GiB from huggingface.co, 16.0 MiB/s, 3m12s left",
        )


def test_the_report_has_the_progress_as_fields_and_changes_with_them() -> None:
    running = seen(FetchState.RUNNING, progress=PROGRESS)
    (report,) = [action for action in plan(running).actions if isinstance(action, ReportRank)]
    assert report.fetch == FetchStatus(
        node="a",
        phase="Downloading",
        present_bytes=GIB,
        total_bytes=4 * GIB,
        bytes_per_second=GIB // 64,
        eta_seconds=192,
        source="huggingface.co",
    )
    written = RankStatus(
        replica_uid="u1", node="a", conditions=report.conditions, fetch=report.fetch
    )
    again = replace(running, reported=written)
    assert not [action for action in plan(again).actions if isinstance(action, ReportRank)]
    listing = replace(PROGRESS, phase="Listing", total_bytes=0)
    for before_or_after in (
        seen(FetchState.PRESENT),
        FAILED,
        seen(FetchState.RUNNING, progress=listing),
    ):
        assert fetch_status(before_or_after) is None


def test_a_failure_shows_its_reason_and_the_next_attempt() -> None:
    condition = find_condition(replica_conditions(FAILED), "Ready")
    assert condition is not None
    assert condition.reason == "HashMismatch"
    assert condition.message == "model.safetensors has other bytes; next attempt at 00:00:00 UTC"


def test_verifying_is_told_apart_from_downloading() -> None:
    verifying = replace(PROGRESS, phase="Verifying")
    condition = find_condition(
        replica_conditions(seen(FetchState.RUNNING, progress=verifying)), "ModelPresent"
    )
    assert condition is not None
    assert condition.reason == "Verifying"


def test_the_model_stays_present_while_its_engine_runs() -> None:
    """The reconciler would give the hub's token to a node without the condition."""
    before = replica_conditions(seen(FetchState.PRESENT, message="4.0 GiB in 3m"))
    engine = ObservedEngine(replica_uid="u1", is_running=True, state="Ready")
    reported = RankStatus(replica_uid="u1", node="a", conditions=before)
    running = ObservedReplica(replica=wanted(), engine=engine, reported=reported)
    condition = find_condition(replica_conditions(running), "ModelPresent")
    assert condition == find_condition(before, "ModelPresent")
    absent = RankStatus(replica_uid="u1", node="a")
    assert (
        find_condition(replica_conditions(replace(running, reported=absent)), "ModelPresent")
        is None
    )
