"""Counters, gauges and histograms in Prometheus' text form. No global state; knows nothing of what is counted.

Everything is used by one thread alone: the event loop that also answers `/metrics`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, Protocol

from machinery.promtext import head, histogram_lines, labelled

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BY_LABELS = itemgetter(0)


class Series(Protocol):
    """Whatever has figures to show."""

    def lines(self) -> Iterator[str]:
        """Yield Prometheus' text."""
        ...


@dataclass(slots=True)
class Tally:
    """A number that only grows: what a counter has for one combination of labels."""

    count: int = 0


class Counter:
    """Numbers that only grow, one for each combination of labels."""

    def __init__(self, name: str, help_: str, labels: Sequence[str] = ()) -> None:
        self.name, self._help, self._labels = name, help_, tuple(labels)
        self._values: dict[tuple[str, ...], Tally] = {}

    def add(self, *labels: str, count: int = 1) -> None:
        """Count so many more."""
        found = self._values.get(labels)
        if found is None:
            found = self.child(*labels)
        found.count += count

    def child(self, *labels: str) -> Tally:
        """Return the number for these labels: whoever counts often keeps it, and adds to it."""
        found = self._values.get(labels)
        if found is None:
            found = self._values[labels] = Tally()
        return found

    def value(self, *labels: str) -> int:
        """Return the count."""
        found = self._values.get(labels)
        return found.count if found is not None else 0

    def drop(self, is_gone: Callable[[tuple[str, ...]], bool]) -> None:
        """Forget the combinations of labels that the function says are gone."""
        self._values = {key: found for key, found in self._values.items() if not is_gone(key)}

    def lines(self) -> Iterator[str]:
        """Yield Prometheus' text."""
        yield from head(self.name, self._help, "counter")
        for values, found in sorted(self._values.items(), key=_BY_LABELS):
            yield f"{self.name}{labelled(self._labels, values)} {found.count}"


class Gauge:
    """A number that somebody else keeps, and that is asked for when somebody looks; `counter` if it only grows."""

    def __init__(
        self,
        name: str,
        help_: str,
        read: Callable[[], float],
        type_: Literal["gauge", "counter"] = "gauge",
    ) -> None:
        self._name, self._help, self._read, self._type = name, help_, read, type_

    def lines(self) -> Iterator[str]:
        """Yield Prometheus' text."""
        yield from head(self._name, self._help, self._type)
        # Twelve digits: bytes and tokens are wrong with the six of a bare "g".
        yield f"{self._name} {self._read():.12g}"


class Gauges:
    """The same for each value of one label."""

    def __init__(
        self, name: str, help_: str, label: str, read: Callable[[], Mapping[str, int]]
    ) -> None:
        self._name, self._help, self._label, self._read = name, help_, label, read

    def lines(self) -> Iterator[str]:
        """Yield Prometheus' text."""
        yield from head(self._name, self._help, "gauge")
        for value, number in sorted(self._read().items()):
            yield f"{self._name}{labelled((self._label,), (value,))} {number}"


class Distribution:
    """How often which duration was seen: what a histogram has for one combination of labels."""

    __slots__ = ("bounds", "counts", "total_s")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total_s += seconds


class Histogram:
    """How often which duration was seen; `bounds` are the buckets' upper ends in seconds, the smallest first."""

    def __init__(
        self, name: str, help_: str, labels: Sequence[str], *, bounds: Sequence[float]
    ) -> None:
        self.name, self._help, self._labels = name, help_, tuple(labels)
        self._bounds = tuple(bounds)
        self._found: dict[tuple[str, ...], Distribution] = {}

    def observe(self, seconds: float, *labels: str) -> None:
        """Count one duration."""
        self.child(*labels).observe(seconds)

    def child(self, *labels: str) -> Distribution:
        """Return the durations for these labels: whoever observes often keeps it."""
        found = self._found.get(labels)
        if found is None:
            found = self._found[labels] = Distribution(self._bounds)
        return found

    def items(self) -> Iterable[tuple[tuple[str, ...], Distribution]]:
        """Return the durations by labels."""
        return self._found.items()

    def drop(self, is_gone: Callable[[tuple[str, ...]], bool]) -> None:
        """Forget the combinations of labels that the function says are gone."""
        self._found = {key: found for key, found in self._found.items() if not is_gone(key)}

    def lines(self) -> Iterator[str]:
        """Yield Prometheus' text."""
        yield from head(self.name, self._help, "histogram")
        for values, found in sorted(self._found.items(), key=_BY_LABELS):
            yield from histogram_lines(
                self.name,
                self._labels,
                values,
                bounds=self._bounds,
                counts=found.counts,
                total_s=found.total_s,
            )


def text(parts: Iterable[Series]) -> str:
    """Return it all in Prometheus' text form."""
    return "".join(f"{line}\n" for part in parts for line in part.lines())
