"""Order of test files in a run: files that wait are spread among files that compute, and none of them comes last.

Whole fleets wait for processes and leases. If all workers ran them at the same time, the processors would have nothing
to do, and everything that computes would come after.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from typing_extensions import override
from xdist.scheduler import LoadFileScheduling

_WAITING = ("soak", "fleet", "etcd")
_COMPUTING = ("mlx",)
# The part of the run in which the last file that waits begins.
_SPREAD = 0.8
# Files that one worker runs because they share what costs seconds to make: a
# browser, an engine behind a gateway. `tests/dashboard/test_page.py` is as long as the other pages together.
_UNITS = {
    "pages": re.compile(r"tests/dashboard/test_(\w+_page|usage)\.py"),
    "clients": re.compile(r"tests/gateway/clients/test_\w+\.py"),
}


class UnitScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives workers whole files, and to one of them those that share what costs seconds to make."""

    @override
    def _split_scope(self, nodeid: str) -> str:
        return _unit(nodeid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Tests that one worker runs, as positions in the list of all; `waits` if they mostly wait for processes."""

    items: tuple[int, ...] = ()
    waits: bool = True


def units_of(items: Sequence[pytest.Item]) -> list[Unit]:
    """Return all tests in units, in the order of the first test of each."""
    positions: dict[str, list[int]] = {}
    for position, item in enumerate(items):
        positions.setdefault(_unit(item.nodeid), []).append(position)
    return [
        Unit(items=tuple(tests), waits=any(_waits(items[position]) for position in tests))
        for tests in positions.values()
    ]


def next_unit(pending: list[Unit], running: Sequence[Unit]) -> Unit | None:
    """Take the next unit from those that are pending.

    As many units compute at the same time as there are processors, while others wait.
    """
    computing = sum(not unit.waits for unit in running)
    may_compute = computing < (os.cpu_count() or 1)
    unit = next((unit for unit in pending if unit.waits or may_compute), None)
    if unit is None and pending:
        unit = pending[0]
    if unit is not None:
        pending.remove(unit)
    return unit


def _waits(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(marker) for marker in _WAITING)


def _unit(nodeid: str) -> str:
    """Return the name of what runs together with a test: its file, or the files that share what costs seconds."""
    file = nodeid.partition("::")[0]
    return next((unit for unit, files in _UNITS.items() if files.fullmatch(file)), file)


def sort_by_length(items: list[pytest.Item]) -> None:
    """Sort items in place, file by file; keep the order within a file.

    Of files that wait those with whole fleets come first, of those that compute the ones with engines.
    """
    markers: dict[str, set[str]] = {}
    for item in items:
        found = markers.setdefault(_file(item), set())
        found.update(marker.name for marker in item.iter_markers())
    waiting = [file for file, found in markers.items() if found & set(_WAITING)]
    computing = [file for file in markers if file not in set(waiting)]
    waiting.sort(key=lambda file: _rank(markers[file], _WAITING))
    computing.sort(key=lambda file: _rank(markers[file], _COMPUTING))
    places = {**dict(_spread(waiting, _SPREAD)), **dict(_spread(computing, 1.0))}
    items.sort(key=lambda item: places[_file(item)])


def _spread(files: Sequence[str], end: float) -> Iterator[tuple[str, float]]:
    """Yield each file with its place in the run, from 0 to `end`."""
    for number, file in enumerate(files):
        yield file, number * end / len(files)


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _rank(markers: set[str], order: Sequence[str]) -> int:
    return next((rank for rank, name in enumerate(order) if name in markers), len(order))
