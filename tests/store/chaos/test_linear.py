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


GOOD = {
    "nothing": [],
    "one-after-the-other": [read(0, 1, None), write(2, 3, "x"), read(4, 5, "x")],
    "two-reads-see-a-write-under-way": [write(0, 10, "x"), read(1, 2, None), read(3, 4, "x")],
    "swaps-in-a-chain": [
        swap(0, 9, None, "x", ok=True),
        swap(0, 9, "y", "z", ok=True),
        swap(0, 9, "x", "y", ok=True),
        read(10, 11, "z"),
    ],
    "a-refusal-because-of-a-swap-under-way": [
        swap(0, 9, None, "x", ok=True),
        swap(1, 2, None, "y", ok=False),
        read(3, 4, "x"),
    ],
    "an-unknown-swap-happened": [swap(0, 1, None, "x", ok=None), read(5, 6, "x")],
    "an-unknown-swap-happened-late": [
        swap(0, NEVER, None, "x", ok=None),
        read(5, 6, None),
        read(7, 8, "x"),
    ],
    "an-unknown-swap-never-happened": [swap(0, 1, None, "x", ok=None), read(5, 6, None)],
    "an-unknown-write-happened-between": [
        write(0, NEVER, "x"),
        swap(1, 2, None, "y", ok=True),
        swap(3, 4, "x", "z", ok=True),
    ],
    "an-unknown-read-says-nothing": [call(0, NEVER, Read(value="x"))],
}

BAD = {
    "lost-write": [write(0, 1, "x"), read(2, 3, None)],
    "read-of-what-nobody-wrote": [read(0, 1, "x")],
    "read-before-the-write": [read(0, 1, "x"), write(2, 3, "x")],
    "time-runs-back": [write(0, 10, "x"), read(1, 2, "x"), read(3, 4, None)],
    "two-swaps-of-one-value": [swap(0, 9, None, "x", ok=True), swap(0, 9, None, "y", ok=True)],
    "a-swap-that-was-refused-and-written": [swap(0, 1, None, "x", ok=False), read(2, 3, "x")],
    "a-refusal-without-a-reason": [swap(0, 1, None, "x", ok=False)],
    "an-unknown-swap-that-happened-twice": [
        swap(0, NEVER, None, "x", ok=None),
        write(1, 2, "y"),
        swap(3, 4, "x", "z", ok=True),
        swap(5, 6, "z", None, ok=True),
        read(7, 8, "x"),
        read(9, 10, "y"),
    ],
    "an-unknown-swap-that-happened-before-it-was-made": [
        read(0, 1, "x"),
        swap(2, NEVER, None, "x", ok=None),
    ],
    "two-witnesses-disagree": [
        write(0, 10, "x"),
        write(0, 10, "y"),
        read(11, 12, "x"),
        read(13, 14, "y"),
    ],
}


@pytest.mark.parametrize("name", GOOD)
def test_a_linearizable_history_passes(name: str) -> None:
    assert check(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_a_violation_is_found_with_its_place(name: str) -> None:
    verdict = check(BAD[name])
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


@pytest.mark.parametrize("seed", range(5))
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
