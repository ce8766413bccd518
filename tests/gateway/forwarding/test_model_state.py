"""The retry budget: never more than its percentage of the last ten seconds, plus a floor; and how long requests wait."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.forwarding.model_state import WINDOW_S, ModelStates, RetryBudget
from gateway.routing.table import ServedModel
from machinery.clock import SystemClock
from schemas.routing import Queueing, Routing


def spent(budget: RetryBudget, now_s: float, most: int = 1000) -> int:
    return next(n for n in range(most) if not budget.spend(now_s))


def test_a_few_are_always_allowed() -> None:
    budget = RetryBudget(20)
    assert spent(budget, 100.0) == 10
    assert spent(budget, 109.9) == 0
    assert spent(budget, 110.0) == 10


moments = st.lists(st.tuples(st.sampled_from(["ask", "spend"]), st.floats(0, 4)), max_size=200)


@given(moments, st.integers(0, 100), st.integers(0, 10))
def test_the_sums_are_those_of_the_last_ten_seconds(
    story: list[tuple[str, float]], percent: int, floor: int
) -> None:
    """Equal to the sums of a list of all events."""
    budget, now_s = RetryBudget(percent, floor), 0.0
    asked: list[int] = []
    taken: list[int] = []
    for what, later_s in story:
        now_s += later_s
        since = int(now_s) - WINDOW_S + 1
        if what == "ask":
            budget.count(now_s)
            asked.append(int(now_s))
            continue
        recent = sum(second >= since for second in asked)
        used = sum(second >= since for second in taken)
        is_allowed = used < floor + recent * percent // 100
        assert budget.spend(now_s) is is_allowed
        if is_allowed:
            taken.append(int(now_s))


def served(start_s: float, routing: Routing) -> ServedModel:
    return ServedModel(
        name="m", created=0, backends=(), reason="", routing=routing, start_s=start_s
    )


def test_requests_wait_for_a_restart_as_long_as_it_takes() -> None:
    """The last known time counts while no engine is left, and a declared limit counts more."""
    states, routing = ModelStates(SystemClock(), silence_s=600.0), Routing()
    state = states.of(served(0.0, routing))
    assert state.policy.recovery_s == 10.0
    states.update({"m": served(40.0, routing)})
    assert state.policy.recovery_s == state.terms.policy.recovery_s == 65.0
    states.update({"m": served(0.0, routing)})
    assert state.policy.recovery_s == 65.0
    states.update({"m": served(2.0, routing)})
    assert state.policy.recovery_s == 10.0
    states.update({"m": served(600.0, routing)})
    assert state.policy.recovery_s == 120.0
    declared = Routing(queueing=Queueing(cold_start="3s"))
    states.update({"m": served(600.0, declared)})
    assert state.policy.recovery_s == 3.0
