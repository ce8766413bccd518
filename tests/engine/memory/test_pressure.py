"""Memory pressure: the measures at each water mark, without flapping."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory import pressure
from engine.memory.pressure import MemoryPressure, MemoryReading, PressureLevel
from tests.support.sampling import samples

WEIGHTS, LIMIT = 4000, 5000  # a room of 1,000, so that marks are at 850 and 950
parts = st.integers(0, 1200)


def reading(taken: int, *, buffers: int = 0, prefix: int = 0) -> MemoryReading:
    """Return a reading in which the given share of the memory is used."""
    active = WEIGHTS + taken - buffers
    return MemoryReading(active_bytes=active, buffer_bytes=buffers, prefix_bytes=prefix)


def look(before: MemoryPressure, now: MemoryReading) -> MemoryPressure:
    return pressure.assess(before, now, limit_bytes=LIMIT, weights_bytes=WEIGHTS)


def levels(used: list[int]) -> list[PressureLevel]:
    """Return the pressure after each of the readings."""
    looks = itertools.accumulate(
        used, lambda before, taken: look(before, reading(taken)), initial=MemoryPressure()
    )
    return [memory_pressure.level for memory_pressure in looks][1:]


N, T, C = PressureLevel.NORMAL, PressureLevel.TIGHT, PressureLevel.CRITICAL


@pytest.mark.parametrize(
    ("used", "found"),
    [
        pytest.param([0, 849, 850, 949, 950], [N, N, T, T, C], id="up"),
        pytest.param([960, 900, 850, 849, 800, 799], [C, C, C, T, T, N], id="down"),
        pytest.param([860, 840, 801, 799, 840], [T, T, T, N, N], id="tight-lasts-a-little"),
        pytest.param([960, 100], [C, N], id="all-gone-at-once"),
        pytest.param([5000], [C], id="more-than-there-is"),
    ],
)
def test_levels(used: list[int], found: list[PressureLevel]) -> None:
    assert levels(used) == found


@settings(max_examples=samples(50))
@given(st.lists(parts, max_size=10), st.integers(0, 50))
def test_a_mark_is_not_crossed_twice_by_small_steps(path: list[int], wobble: int) -> None:
    """Check that readings within half of the gap change the level at most once, after any history."""
    before = levels(path)[-1:] or [N]
    for middle in (825, 875, 925, 975):
        around = [middle - wobble // 2, middle + wobble // 2] * 4
        pressure_levels = levels([*path, *around])[len(path) :]
        changes = sum(
            one is not other for one, other in itertools.pairwise([*before, *pressure_levels])
        )
        assert changes <= 2
        assert len(set(pressure_levels[2:])) == 1


@given(st.lists(parts, min_size=1, max_size=30))
def test_more_use_is_never_less_pressure(path: list[int]) -> None:
    less = levels(path)
    more = levels([taken + 10 for taken in path])
    assert all(one <= other for one, other in zip(less, more, strict=True))


def test_a_model_that_fills_its_machine_is_not_under_pressure() -> None:
    for weights in (WEIGHTS, LIMIT, LIMIT + 1):
        now = MemoryReading(active_bytes=weights, buffer_bytes=0, prefix_bytes=0)
        memory_pressure = pressure.assess(
            MemoryPressure(), now, limit_bytes=LIMIT, weights_bytes=weights
        )
        assert memory_pressure.level is PressureLevel.NORMAL


def test_the_prefix_cache_is_halved_once_and_then_emptied() -> None:
    tight = look(MemoryPressure(), reading(860, prefix=300))
    assert tight == MemoryPressure(level=T, prefix_cap_bytes=150)
    assert look(tight, reading(855, prefix=150)) == tight  # not halved again
    critical = look(tight, reading(990, prefix=150))
    assert critical == MemoryPressure(level=C, prefix_cap_bytes=0)
    again = look(critical, reading(830))
    assert again == MemoryPressure(level=T, prefix_cap_bytes=0)
    assert look(again, reading(700)) == MemoryPressure()


@pytest.mark.parametrize(
    ("level", "buffers", "clears"), [(N, 500, False), (T, 21, True), (T, 20, False), (C, 500, True)]
)
def test_buffers_worth_clearing_are_cleared(
    level: PressureLevel, buffers: int, *, clears: bool
) -> None:
    found = pressure.should_clear_buffers(
        MemoryPressure(level=level),
        reading(900, buffers=buffers),
        limit_bytes=LIMIT,
        weights_bytes=WEIGHTS,
    )
    assert found is clears
