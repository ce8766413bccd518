"""The checker of linearizability accepts good histories, and finds the fault in bad ones."""

import random

import pytest

from tests.support.linear import NEVER, Action, Call, Read, Swap, Value, Write, check


def call(start: float, end: float, action: Action, who: str = "a") -> Call:
    return Call(who=who, action=action, invoked_at=start, returned_at=end)


def read(start: float, end: float, value: Value) -> Call:
    return call(start, end, Read(value=value))


def write(start: float, end: float, value: Value) -> Call:
    return call(start, end, Write(value=value))


def swap(start: float, end: float, expected: Value, value: Value, *, ok: bool | None) -> Call:
    return call(start, end, Swap(expected=expected, value=value, swapped=ok))


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([write(0, 1, "x"), read(2, 3, None)], id="lost-write"),
        pytest.param(
            [write(0, 10, "x"), read(1, 2, "x"), read(3, 4, None)], id="time-runs-backwards"
        ),
        pytest.param(
            [swap(0, 9, None, "x", ok=True), swap(0, 9, None, "y", ok=True)],
            id="two-swaps-of-one-value",
        ),
        pytest.param([swap(0, 1, None, "x", ok=False), read(2, 3, "x")], id="refused-and-written"),
        pytest.param(
            [read(0, 1, "x"), swap(2, NEVER, None, "x", ok=None)], id="effect-before-its-call"
        ),
    ],
)
def test_a_violation_is_found_with_its_place(history: list[Call]) -> None:
    verdict = check(history)
    assert not verdict
    assert verdict.stuck


def simulated(seed: int, *, clients: int, length: int) -> list[Call]:
    """Return the records of clients of a correct register: each call takes effect at one moment within it."""
    dice = random.Random(seed)
    value: Value = None
    calls: list[Call] = []
    free_at = dict.fromkeys(range(clients), 0.0)
    known: dict[int, Value] = dict.fromkeys(range(clients))
    acts: list[tuple[float, float, float, int, int]] = []
    for number in range(length):
        who = dice.randrange(clients)
        start = free_at[who] + dice.random()
        point, free_at[who] = start + dice.random(), start + 2.0
        acts.append((point, start, free_at[who], who, number))
    for _, start, end, who, number in sorted(acts):
        if dice.random() < 0.4:
            known[who] = value
            calls.append(call(start, end, Read(value=value), str(who)))
            continue
        fits, new = known[who] == value, f"v{number}"
        answered = dice.random() > 0.03
        calls.append(
            call(
                start,
                end if answered else NEVER,
                Swap(expected=known[who], value=new, swapped=fits if answered else None),
                str(who),
            )
        )
        if fits and (answered or dice.random() < 0.5):
            value = new
            known[who] = new
    return calls


@pytest.mark.parametrize("seed", range(3))
def test_one_violation_in_a_long_history_is_found_quickly(seed: int) -> None:
    history = simulated(seed, clients=8, length=1500)
    verdict = check(history)
    assert verdict, verdict.stuck
    assert verdict.explored < 20 * len(history)
    written = [c for c in history if isinstance(c.action, Swap) and c.action.swapped]
    stale = written[len(written) // 2].action
    assert isinstance(stale, Swap)
    end = max(c.returned_at for c in history if c.returned_at != NEVER)
    assert not check([*history, read(end + 1, end + 2, stale.expected)])
