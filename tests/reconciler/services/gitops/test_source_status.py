"""Status and schedule of a source: pure, without a repository."""

from datetime import UTC, datetime, timedelta

import pytest

from reconciler.services.gitops import source_status
from reconciler.services.gitops.source_status import SourceProblem, SourceResult, SourceState
from schemas.gitsource import (
    SYNC_REQUESTED,
    Drift,
    GitReference,
    GitSource,
    GitSourceSpec,
    GitSourceStatus,
    HealthCheck,
    InventoryEntry,
    manager_of,
    source_of_manager,
)
from schemas.meta import ApiObject, Condition, ConditionStatus, ObjectKey, ObjectMeta
from schemas.pools import NodePool, NodePoolSpec, NodePoolStatus
from schemas.records import ApplySet

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BROKEN = SourceProblem(reason="BrokenManifests", message="a.yaml:1:2: no. Write: yes", stalls=True)
AWAY = SourceProblem(reason="Unreachable", message="it cannot be reached: refused", stalls=False)
ONE = (InventoryEntry(kind="NodePool", name="a"),)


def source(
    status: GitSourceStatus | None = None, *, depends_on: tuple[str, ...] = (), sync: str = ""
) -> GitSource:
    notes = {SYNC_REQUESTED: sync} if sync else {}
    return GitSource(
        metadata=ObjectMeta(name="fleet", uid="u", generation=3, annotations=notes),
        spec=GitSourceSpec(repository="https://git.example.com/fleet.git", depends_on=depends_on),
        status=status,
    )


def told(found: GitSourceStatus) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status.value, c.reason) for c in found.conditions}


BEFORE = GitSourceStatus(applied_revision="main@aa", observed_revision="main@aa", inventory=ONE)


@pytest.mark.parametrize(
    ("old", "found", "wanted"),
    [
        pytest.param(
            None, SourceResult(observed="main@aa", applied="main@aa", inventory=ONE),
            {"Ready": "True", "Reconciling": "False", "Stalled": "False"}, id="applied",
        ),
        pytest.param(
            BEFORE, SourceResult(observed="main@bb", problem=BROKEN),
            {"Ready": "False", "Reconciling": "False", "Stalled": "True"}, id="broken",
        ),
        pytest.param(
            BEFORE, SourceResult(applied="main@aa", inventory=ONE, problem=AWAY),
            {"Ready": "Unknown", "Reconciling": "True", "Stalled": "False"}, id="away",
        ),
        pytest.param(
            None, SourceResult(problem=AWAY), {"Ready": "False", "Reconciling": "True", "Stalled": "False"},
            id="away-from-the-start",
        ),
        pytest.param(
            BEFORE, SourceResult(is_suspended=True), {"Ready": "Unknown", "Reconciling": "False", "Stalled": "False"},
            id="suspended",
        ),
    ],
)  # fmt: skip
def test_conditions(
    old: GitSourceStatus | None, found: SourceResult, wanted: dict[str, str]
) -> None:
    made = source_status.compute_status(source(old), found, NOW)
    assert {type_: truth for type_, (truth, _) in told(made).items()} == wanted
    # An equal result changes nothing, at any time.
    again = source_status.compute_status(source(made), found, NOW + timedelta(hours=1))
    assert again == made


def test_the_applied_revision_stays_in_the_status() -> None:
    applied = SourceResult(observed="main@aa", applied="main@aa", inventory=ONE)
    first = source_status.compute_status(source(), applied, NOW)
    source_result = SourceResult(observed="main@bb", problem=BROKEN)
    second = source_status.compute_status(source(first), source_result, NOW + timedelta(hours=1))
    assert (second.observed_revision, second.applied_revision) == ("main@bb", "main@aa")
    assert (second.applied_at, second.inventory) == (NOW, ONE)
    ready = next(c for c in second.conditions if c.type == "Ready")
    assert ready.message == "a.yaml:1:2: no. Write: yes. main@aa stays applied"


def test_drift_is_in_the_message() -> None:
    drift = (
        Drift(kind="NodePool", name="a", fields=("spec.priority",), managers=("fleetctl-edit",)),
        Drift(kind="NodePool", name="b", fields=()),
    )
    source_result = SourceResult(applied="main@aa", inventory=ONE, drift=drift)
    made = source_status.compute_status(source(), source_result, NOW)
    ready = next(c for c in made.conditions if c.type == "Ready")
    assert ready.message == (
        "main@aa is applied: 1 object; others changed nodepool/a spec.priority (fleetctl-edit); "
        "nodepool/b, which was deleted"
    )


def pool(*, truth: ConditionStatus, observed: int = 1) -> NodePool:
    ready = Condition(type="Ready", status=truth, reason="Why", observed_generation=observed)
    return NodePool(
        metadata=ObjectMeta(name="a", generation=1),
        spec=NodePoolSpec(),
        status=NodePoolStatus(conditions=(ready,)),
    )


@pytest.mark.parametrize(
    ("there", "said"),
    [
        pytest.param(None, ("nodepool/a does not exist",), id="missing"),
        pytest.param(pool(truth=ConditionStatus.TRUE), (), id="well"),
        pytest.param(pool(truth=ConditionStatus.FALSE), ("nodepool/a is not Ready: Why",), id="unwell"),
        pytest.param(pool(truth=ConditionStatus.TRUE, observed=0), ("nodepool/a is not Ready yet",), id="old-news"),
    ],
)  # fmt: skip
def test_health(there: ApiObject | None, said: tuple[str, ...]) -> None:
    check = HealthCheck(kind="NodePool", name="a")
    assert source_status.failing_health_checks([check], {ObjectKey("NodePool", "a"): there}) == said


def test_a_dependency_cycle_is_found_from_each_of_its_sources() -> None:
    every = {
        "a": source(depends_on=("b",)),
        "b": source(depends_on=("c", "d")),
        "c": source(),
        "d": source(depends_on=("b",)),
    }
    assert source_status.dependency_cycle("b", every) == ("b", "d", "b")
    assert source_status.dependency_cycle("a", every) == ()


def memory(*, fetched_at: float | None = 100.0, failures: int = 0) -> SourceState:
    problem = AWAY if failures else None
    return SourceState(
        uid="u", generation=3, fetched_at=fetched_at, failures=failures, problem=problem
    )


def test_a_source_is_due_after_its_interval_or_retry() -> None:
    assert source_status.is_fetch_due(memory(fetched_at=None), source(), 0.0)
    assert not source_status.is_fetch_due(memory(), source(), 159.0)
    assert source_status.is_fetch_due(memory(), source(), 160.0)
    assert source_status.is_fetch_due(memory(), source(sync="now"), 101.0)
    done = GitSourceStatus(last_sync="now")
    assert not source_status.is_fetch_due(memory(), source(done, sync="now"), 101.0)
    # What may pass is tried again soon, and ever later.
    waits = [source_status.wait_s(memory(failures=n), source()) for n in range(1, 8)]
    longest = [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True))
    assert waits == [source_status.wait_s(memory(failures=n), source()) for n in range(1, 8)]


def test_a_changed_spec_starts_with_a_new_state() -> None:
    state = memory()
    assert source_status.current_state(state, source()) is state
    edited = source().model_copy(update={"metadata": ObjectMeta(name="f", uid="u", generation=4)})
    assert source_status.current_state(state, edited).fetched_at is None


def test_revisions() -> None:
    commit = "9f1c" * 10
    assert source_status.revision_of(GitReference(tag="v1"), commit) == f"v1@{commit}"
    assert source_status.revision_of(GitReference(commit=commit), commit) == commit
    assert source_status.commit_in(f"feature/a@b@{commit}") == commit
    assert source_status.short_revision(f"main@{commit}") == "main@9f1c9f1"
    assert source_of_manager(manager_of("fleet")) == "fleet"
    assert source_of_manager("fleetctl") is None


def test_the_longest_name_of_a_source_is_that_of_a_set() -> None:
    name = source_status.apply_set_name("g" * 128)
    assert ApplySet(name=name, manager=manager_of("g"), updated=NOW).name == name
