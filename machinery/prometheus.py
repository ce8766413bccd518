"""Prometheus' text form, line by line. Pure; keeps no figures.

Counters, gauges and histograms in Prometheus' text form. No global state; knows nothing of what is counted.

Everything is used by one thread alone: the event loop that also answers `/metrics`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Literal, Protocol


def histogram_lines(
    name: str,
    labels: Sequence[str],
    values: Sequence[str],
    *,
    bounds: Sequence[float],
    counts: Sequence[int],
    total_s: float,
) -> Iterator[str]:
    """Yield the lines of one histogram; `counts` are by bucket of `bounds`, and above them."""
    ends = [f"{bound:g}" for bound in bounds] + ["+Inf"]
    for end, total in zip(ends, accumulate(counts), strict=True):
        yield f"{name}_bucket{format_labels((*labels, 'le'), (*values, end))} {total}"
    yield f"{name}_sum{format_labels(labels, values)} {total_s:.6f}"
    yield f"{name}_count{format_labels(labels, values)} {sum(counts)}"


def family_header(name: str, help_: str, type_: str) -> tuple[str, str]:
    """Return the two lines before a family's figures."""
    return f"# HELP {name} {help_}", f"# TYPE {name} {type_}"


def format_labels(names: Sequence[str], values: Sequence[str]) -> str:
    """Return labels in braces; nothing if there are none."""
    if not names:
        return ""
    pairs = (
        f'{name}="{_escape_label_value(value)}"' for name, value in zip(names, values, strict=True)
    )
    return "{" + ",".join(pairs) + "}"


def _escape_label_value(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BY_LABEL_VALUES = itemgetter(0)


class MetricFamily(Protocol):
    """Whatever has figures to show."""

    def lines(self) -> Iterator[str]:
        """Yield Prometheus' text."""
        ...


@dataclass(slots=True)
class CounterValue:
    """A number that only grows: what a counter has for one combination of labels."""

    count: int = 0


class Counter:
    """Numbers that only grow, one for each combination of labels."""

    def __init__(self, name: str, help_: str, labels: Sequence[str] = ()) -> None:
        self.name, self._help, self._labels = name, help_, tuple(labels)
        self._values: dict[tuple[str, ...], CounterValue] = {}

    def add(self, *labels: str, count: int = 1) -> None:
        """Count so many more."""
        found = self._values.get(labels)
        if found is None:
            found = self.child(*labels)
        found.count += count

    def child(self, *labels: str) -> CounterValue:
        """Return the number for these labels: whoever counts often keeps it, and adds to it."""
        found = self._values.get(labels)
        if found is None:
            found = self._values[labels] = CounterValue()
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
        yield from family_header(self.name, self._help, "counter")
        for values, found in sorted(self._values.items(), key=_BY_LABEL_VALUES):
            yield f"{self.name}{format_labels(self._labels, values)} {found.count}"


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
        yield from family_header(self._name, self._help, self._type)
        # Twelve digits: bytes and tokens are wrong with the six of a bare "g".
        yield f"{self._name} {self._read():.12g}"


class LabelledGauge:
    """The same for each value of one label."""

    def __init__(
        self, name: str, help_: str, label: str, read: Callable[[], Mapping[str, int]]
    ) -> None:
        self._name, self._help, self._label, self._read = name, help_, label, read

    def lines(self) -> Iterator[str]:
        """Yield Prometheus' text."""
        yield from family_header(self._name, self._help, "gauge")
        for value, number in sorted(self._read().items()):
            yield f"{self._name}{format_labels((self._label,), (value,))} {number}"


class HistogramValue:
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
        self._found: dict[tuple[str, ...], HistogramValue] = {}

    def observe(self, seconds: float, *labels: str) -> None:
        """Count one duration."""
        self.child(*labels).observe(seconds)

    def child(self, *labels: str) -> HistogramValue:
        """Return the durations for these labels: whoever observes often keeps it."""
        found = self._found.get(labels)
        if found is None:
            found = self._found[labels] = HistogramValue(self._bounds)
        return found

    def items(self) -> Iterable[tuple[tuple[str, ...], HistogramValue]]:
        """Return the durations by labels."""
        return self._found.items()

    def drop(self, is_gone: Callable[[tuple[str, ...]], bool]) -> None:
        """Forget the combinations of labels that the function says are gone."""
        self._found = {key: found for key, found in self._found.items() if not is_gone(key)}

    def lines(self) -> Iterator[str]:
        """Yield Prometheus' text."""
        yield from family_header(self.name, self._help, "histogram")
        for values, found in sorted(self._found.items(), key=_BY_LABEL_VALUES):
            yield from histogram_lines(
                self.name,
                self._labels,
                values,
                bounds=self._bounds,
                counts=found.counts,
                total_s=found.total_s,
            )


def render(parts: Iterable[MetricFamily]) -> str:
    """Return it all in Prometheus' text form."""
    return "".join(f"{line}\n" for part in parts for line in part.lines())
