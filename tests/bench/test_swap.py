"""Many models on few Macs, in virtual time: what must hold while models give way to each other."""

from itertools import product

import pytest

from bench.swap import ROOM, fewest_loads, replay


def loads_of(models: tuple[int, ...], loaded: frozenset[int], room: int) -> int:
    """Return the fewest loads, by trying everything."""
    if not models:
        return 0
    first, rest = models[0], models[1:]
    if first in loaded:
        return loads_of(rest, loaded, room)
    after = loaded | {first}
    options = [after] if len(after) <= room else [after - {old} for old in loaded]
    return 1 + min(loads_of(rest, option, room) for option in options)


def test_fewest_loads() -> None:
    for models in product(range(4), repeat=6):
        assert fewest_loads(models, 2) == loads_of(models, frozenset(), 2)


@pytest.mark.parametrize(
    ("kind", "hours", "most"), [("team", 0.25, 1.6), ("agents", 2.0, 1.3), ("random", 1.0, 1.5)]
)
def test_no_request_fails_and_the_wait_is_told(kind: str, hours: float, most: float) -> None:
    outcome = replay(kind, seed=0, hours=hours)
    assert outcome.loads > ROOM, "models gave way"
    assert (outcome.failed, outcome.cut, outcome.over_memory, outcome.too_early) == (0, 0, 0, 0)
    assert outcome.loads <= most * outcome.fewest
    assert any(message.endswith("and then loads in 13 s") for message in outcome.messages)
