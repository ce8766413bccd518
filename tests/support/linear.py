"""Is a history of reads, writes and compare-and-swaps of one register linearizable? Pure.

The search of Wing and Gong with Lowe's memory of states: some order of the calls, in keeping with
real time, must give every caller what it got. A call without an answer may have happened at any
moment after it was made, or never. Values that are written must be unique.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Value: TypeAlias = str | None
NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """It saw this value; None if there was none."""

    value: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """It wrote without a look."""

    value: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """It was to write `value` if `expected` was still there; None says that nobody knows."""

    expected: Value
    value: Value
    swapped: bool | None


Action: TypeAlias = Read | Write | Swap


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call: from when to when, by whom. `returned_at` is NEVER if the answer did not come."""

    who: str
    action: Action
    invoked_at: float
    returned_at: float = NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """True if there is such an order; if not, `stuck` are the calls that fit nowhere."""

    holds: bool
    stuck: tuple[Call, ...] = ()
    explored: int = 0

    def __bool__(self) -> bool:
        return self.holds


@dataclass(frozen=True, slots=True)
class _State:
    """The operations that are in order so far, as bits, and the value after them."""

    answered: int
    unanswered: int
    first: int
    """No answered call before this one is left to be ordered."""
    value: Value


def check(history: Sequence[Call], initial: Value = None) -> Verdict:
    """Look for an order of the calls that explains every answer."""
    known = sorted((c for c in history if _is_answered(c)), key=lambda c: c.invoked_at)
    unknown = [c for c in history if not _is_answered(c) and not isinstance(c.action, Read)]
    return _Search(known, unknown).run(initial)


def _is_answered(call: Call) -> bool:
    undecided = isinstance(call.action, Swap) and call.action.swapped is None
    return call.returned_at != NEVER and not undecided


class _Search:
    """Depth first, without ever visiting a state twice."""

    def __init__(self, known: Sequence[Call], unknown: Sequence[Call]) -> None:
        self._known = known
        self._unknown = unknown

    def run(self, initial: Value) -> Verdict:
        start = _State(0, 0, 0, initial)
        waiting, states, furthest = [start], {start}, start
        while waiting:
            state = self._look(waiting.pop())
            if state.answered.bit_count() >= furthest.answered.bit_count():
                furthest = state
            if state.first == len(self._known):
                return Verdict(holds=True, explored=len(states))
            for successor in self._successors(state):
                if successor not in states:
                    states.add(successor)
                    waiting.append(successor)
        stuck = tuple(self._known[n] for n in self._candidates(furthest))
        return Verdict(holds=False, stuck=stuck, explored=len(states))

    def _candidates(self, state: _State) -> list[int]:
        """Return the answered calls that may be next: nobody returned before they were made."""
        found: list[int] = []
        limit = NEVER
        for number in range(state.first, len(self._known)):
            call = self._known[number]
            if call.invoked_at > limit:
                break
            if not state.answered >> number & 1:
                found.append(number)
                limit = min(limit, call.returned_at)
        return [n for n in found if self._known[n].invoked_at <= limit]

    def _look(self, state: _State) -> _State:
        """Put in order what only looked and saw this value: waiting could not make that easier."""
        while True:
            looked = [n for n in self._candidates(state) if _only_looks(self._known[n], state)]
            if not looked:
                return state
            for number in looked:
                state = self._after(state, number, state.value)

    def _successors(self, state: _State) -> list[_State]:
        candidates = self._candidates(state)
        limit = min(self._known[n].returned_at for n in candidates)
        made: list[_State] = []
        for number, call in enumerate(self._unknown):
            fits = call.invoked_at <= limit and not state.unanswered >> number & 1
            if fits and _applies(call, state.value):
                bits = state.unanswered | 1 << number
                made.append(_State(state.answered, bits, state.first, _written(call)))
        # Taken from the end: an answered call is the better guess, and the first to return of those.
        for number in sorted(candidates, key=lambda n: -self._known[n].returned_at):
            call = self._known[number]
            if not isinstance(call.action, Read) and _applies(call, state.value):
                made.append(self._after(state, number, _written(call)))
        return made

    def _after(self, state: _State, number: int, value: Value) -> _State:
        answered, first = state.answered | 1 << number, state.first
        while answered >> first & 1:
            first += 1
        return _State(answered, state.unanswered, first, value)


def _only_looks(call: Call, state: _State) -> bool:
    """Return whether the call changed nothing and got what it would get now."""
    match call.action:
        case Read(value=value):
            return value == state.value
        case Swap(swapped=False, expected=expected):
            return expected != state.value
        case _:
            return False


def _applies(call: Call, value: Value) -> bool:
    """Return whether the call would write now."""
    match call.action:
        case Write():
            return True
        case Swap(swapped=False):
            return False
        case Swap(expected=expected):
            return expected == value
        case _:
            return False


def _written(call: Call) -> Value:
    assert not isinstance(call.action, Read)
    return call.action.value
