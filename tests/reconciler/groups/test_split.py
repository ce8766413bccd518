"""Layers dealt out: all of them once, within rooms, and as even in time as any way there is."""

from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.groups.model_split import layer_spans, split_layers
from tests.support.examples import few

PLENTY = 10**9

TABLE: list[tuple[tuple[int, ...], int, tuple[int, ...], tuple[float, ...], tuple[int, ...] | None]] = [
    ((5,) * 30, 0, (PLENTY,) * 3, (1, 1, 1), (10, 10, 10)),
    # Twice as fast, twice as many; and a speed that nobody knows makes all equal.
    ((5,) * 30, 0, (PLENTY,) * 2, (800, 400), (20, 10)),
    ((5,) * 30, 0, (PLENTY,) * 2, (800, 0), (15, 15)),
    ((5,) * 30, 0, (PLENTY,) * 2, (), (15, 15)),
    # A small Mac takes what it has room for, whatever its speed.
    ((5,) * 30, 10, (35, PLENTY), (800, 100), (5, 25)),
    # Rank 0 has the last layers: the heavy one here.
    ((1, 1, 1, 9), 0, (PLENTY,) * 2, (1, 1), (1, 3)),
    ((9, 1, 1, 1), 0, (PLENTY,) * 2, (1, 1), (3, 1)),
    ((1, 1), 0, (PLENTY,) * 2, (1, 1), (1, 1)),
    ((7,), 0, (PLENTY,), (1,), (1,)),
    # Fewer layers than ranks; no room for one layer; room for all but one layer; none for what is fixed.
    ((1,), 0, (PLENTY,) * 2, (1, 1), None),
    ((5,) * 4, 0, (PLENTY, 4), (1, 1), None),
    ((5,) * 4, 0, (10, 9), (1, 1), None),
    ((5,) * 4, 11, (10, PLENTY), (1, 1), None),
    ((), 0, (PLENTY,), (1,), None),
    ((5,), 0, (), (), None),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "fixed", "rooms", "speeds", "wanted"), TABLE)
def test_layers_are_dealt_out(
    layers: tuple[int, ...],
    fixed: int,
    rooms: tuple[int, ...],
    speeds: tuple[float, ...],
    wanted: tuple[int, ...] | None,
) -> None:
    assert split_layers(layers, fixed, rooms, speeds) == wanted


def test_spans_are_those_of_mlx_lm() -> None:
    assert layer_spans((2, 3, 1)) == ((4, 6), (1, 4), (0, 1))


def ways(layers: list[int], ranks: int) -> list[tuple[int, ...]]:
    """Return every way to deal them out, in rank order."""
    cuts = combinations(range(1, len(layers)), ranks - 1)
    return [tuple(b - a for a, b in pairwise((0, *cut, len(layers)))) for cut in cuts]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, list[int], list[float]]:
    layers = draw(st.lists(st.integers(1, 50), min_size=1, max_size=9))
    ranks = draw(st.integers(1, 5))
    rooms = draw(st.lists(st.integers(0, 200), min_size=ranks, max_size=ranks))
    speeds = draw(st.lists(st.sampled_from([100.0, 273.0, 819.0]), min_size=ranks, max_size=ranks))
    return layers, draw(st.integers(0, 40)), rooms, speeds


@settings(max_examples=few(400))
@given(case=cases())
def test_it_is_the_best_of_all_ways(case: tuple[list[int], int, list[int], list[float]]) -> None:
    layers, fixed, rooms, speeds = case

    def slowest(way: tuple[int, ...]) -> float:
        held = [sum(layers[start:stop]) for start, stop in layer_spans(way)]
        fits = all(fixed + own <= room for own, room in zip(held, rooms, strict=True))
        return max(own / pace for own, pace in zip(held, speeds, strict=True)) if fits else inf

    best = min(map(slowest, ways(layers, len(rooms))), default=inf)
    found = split_layers(layers, fixed, rooms, speeds)
    if found is None:
        assert best == inf
        return
    assert sum(found) == len(layers)
    assert min(found) >= 1
    assert sorted(layer for span in layer_spans(found) for layer in range(*span)) == list(
        range(len(layers))
    )
    assert slowest(found) == pytest.approx(best)
