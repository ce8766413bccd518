"""Prometheus metrics: counters, gauges and histograms, their text format, and a parser of it. No global state.

    requests = Counter("fleet_gateway_requests_total", "Requests by outcome.", ("outcome",))
    requests.add("ok")
    render([requests])   # the body of /metrics

All metrics of a process are used by one thread: the event loop that also answers `/metrics`.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Final, Literal, Protocol, TypeAlias

from machinery.version import version

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUILD_INFO: Final = "fleet_build_info"
_BY_LABEL_VALUES = itemgetter(0)

# Bounds on names, labels and values: the text may come from a process that is not ours.
_SAMPLE: Final = re.compile(
    r"(?m)^([a-zA-Z_:][a-zA-Z0-9_:]{0,99})(?:\{([^\n]{0,1000})\})? ([^ \n]{1,40})(?: [^ \n]{1,40})?$"
)
_LABEL: Final = re.compile(r'([a-z_]{1,40})="((?:[^"\\]|\\.){0,300})",?')
_ESCAPES: Final = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_ESCAPE: Final = re.compile(r"\\[\\\"n]")


def histogram_lines(
    name: str,
    labels: Sequence[str],
    values: Sequence[str],
    *,
    bounds: Sequence[float],
    counts: Sequence[int],
    total_s: float,
) -> Iterator[str]:
    """Yield the lines of one histogram; `counts` has one number for each bucket of `bounds`, and one above them."""
    ends = [f"{bound:g}" for bound in bounds] + ["+Inf"]
    for end, total in zip(ends, accumulate(counts), strict=True):
        yield f"{name}_bucket{format_labels((*labels, 'le'), (*values, end))} {total}"
    yield f"{name}_sum{format_labels(labels, values)} {total_s:.6f}"
    yield f"{name}_count{format_labels(labels, values)} {sum(counts)}"


def family_header(name: str, help_: str, type_: str) -> tuple[str, str]:
    """Return the HELP and TYPE lines of a metric family."""
    return f"# HELP {name} {help_}", f"# TYPE {name} {type_}"


def format_labels(names: Sequence[str], values: Sequence[str]) -> str:
    """Return the labels in braces; "" if there are none."""
    if not names:
        return ""
    pairs = (
        f'{name}="{_escape_label_value(value)}"' for name, value in zip(names, values, strict=True)
    )
    return "{" + ",".join(pairs) + "}"


def _escape_label_value(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricFamily(Protocol):
    """A metric with all its label values."""

    def lines(self) -> Iterator[str]:
        """Yield the family in Prometheus' text format."""
        ...


@dataclass(slots=True)
class CounterValue:
    """A number that only grows: a counter's value for one combination of label values."""

    count: int = 0


class Counter:
    """Numbers that only grow, one for each combination of label values."""

    def __init__(self, name: str, help_: str, labels: Sequence[str] = ()) -> None:
        self.name, self._help, self._labels = name, help_, tuple(labels)
        self._values: dict[tuple[str, ...], CounterValue] = {}

    def add(self, *labels: str, count: int = 1) -> None:
        """Add `count` to the value for these label values."""
        value = self._values.get(labels)
        if value is None:
            value = self.child(*labels)
        value.count += count

    def child(self, *labels: str) -> CounterValue:
        """Return the value for these label values; a caller that counts often keeps it."""
        counter_value = self._values.get(labels)
        if counter_value is None:
            counter_value = self._values[labels] = CounterValue()
        return counter_value

    def value(self, *labels: str) -> int:
        """Return the count."""
        counter_value = self._values.get(labels)
        return counter_value.count if counter_value is not None else 0

    def items(self) -> Iterable[tuple[tuple[str, ...], CounterValue]]:
        """Return all values by their label values."""
        return self._values.items()

    def drop(self, is_gone: Callable[[tuple[str, ...]], bool]) -> None:
        """Remove the combinations of label values for which `is_gone` returns true."""
        self._values = {key: found for key, found in self._values.items() if not is_gone(key)}

    def lines(self) -> Iterator[str]:
        """Yield the family in Prometheus' text format."""
        yield from family_header(self.name, self._help, "counter")
        for values, value in sorted(self._values.items(), key=_BY_LABEL_VALUES):
            yield f"{self.name}{format_labels(self._labels, values)} {value.count}"


class Gauge:
    """A number that is read when `/metrics` is answered; `type_` is "counter" if it only grows."""

    def __init__(
        self,
        name: str,
        help_: str,
        read: Callable[[], float],
        type_: Literal["gauge", "counter"] = "gauge",
    ) -> None:
        self._name, self._help, self._read, self._type = name, help_, read, type_

    def lines(self) -> Iterator[str]:
        """Yield the family in Prometheus' text format."""
        yield from family_header(self._name, self._help, self._type)
        # Twelve digits: bytes and tokens are wrong with the six of a bare "g".
        yield f"{self._name} {self._read():.12g}"


class LabelledGauge:
    """Numbers that are read when `/metrics` is answered, one for each value of one label."""

    def __init__(
        self, name: str, help_: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        self._name, self._help, self._label, self._read = name, help_, label, read

    def lines(self) -> Iterator[str]:
        """Yield the family in Prometheus' text format."""
        yield from family_header(self._name, self._help, "gauge")
        for value, number in sorted(self._read().items()):
            yield f"{self._name}{format_labels((self._label,), (value,))} {number}"


class BuildInfo:
    """The release of a process, as the labels of a constant 1; `process` is its kind, such as "gateway"."""

    def __init__(self, process: str) -> None:
        self._process = process

    def lines(self) -> Iterator[str]:
        """Yield the family in Prometheus' text format."""
        yield from family_header(BUILD_INFO, "1, with the release of the process.", "gauge")
        labels = format_labels(("process", "version"), (self._process, version()))
        yield f"{BUILD_INFO}{labels} 1"


class HistogramValue:
    """Counts of durations by bucket: a histogram's value for one combination of label values."""

    __slots__ = ("bounds", "counts", "total_s")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count one duration, or so many that are equal."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total_s += seconds * times


class Histogram:
    """Counts of durations by bucket; `bounds` are the buckets' upper ends in seconds, ascending.

    Lengths in tokens are counted in the same way.
    """

    def __init__(
        self, name: str, help_: str, labels: Sequence[str], *, bounds: Sequence[float]
    ) -> None:
        self.name, self._help, self._labels = name, help_, tuple(labels)
        self._bounds = tuple(bounds)
        self._values: dict[tuple[str, ...], HistogramValue] = {}

    def observe(self, seconds: float, *labels: str) -> None:
        """Count one duration."""
        self.child(*labels).observe(seconds)

    @property
    def bounds(self) -> tuple[float, ...]:
        """The buckets' upper ends."""
        return self._bounds

    def child(self, *labels: str) -> HistogramValue:
        """Return the value for these label values; a caller that observes often keeps it."""
        histogram_value = self._values.get(labels)
        if histogram_value is None:
            histogram_value = self._values[labels] = HistogramValue(self._bounds)
        return histogram_value

    def items(self) -> Iterable[tuple[tuple[str, ...], HistogramValue]]:
        """Return all values by their label values."""
        return self._values.items()

    def drop(self, is_gone: Callable[[tuple[str, ...]], bool]) -> None:
        """Remove the combinations of label values for which `is_gone` returns true."""
        self._values = {key: found for key, found in self._values.items() if not is_gone(key)}

    def lines(self) -> Iterator[str]:
        """Yield the family in Prometheus' text format."""
        yield from family_header(self.name, self._help, "histogram")
        for values, value in sorted(self._values.items(), key=_BY_LABEL_VALUES):
            yield from histogram_lines(
                self.name,
                self._labels,
                values,
                bounds=self._bounds,
                counts=value.counts,
                total_s=value.total_s,
            )


SelectLabels: TypeAlias = Callable[[tuple[str, ...]], tuple[str, ...]]
"""From the label values of a metric to those of its alias, under which its values are summed."""


class CounterAlias:
    """A counter under another name, summed over the labels that the alias does not have."""

    def __init__(
        self, name: str, source: Counter, labels: Sequence[str], select: SelectLabels
    ) -> None:
        self._name, self._source = name, source
        self._labels, self._select = tuple(labels), select

    def lines(self) -> Iterator[str]:
        """Yield the family in Prometheus' text format."""
        totals: dict[tuple[str, ...], int] = {}
        for labels, value in self._source.items():
            key = self._select(labels)
            totals[key] = totals.get(key, 0) + value.count
        yield from family_header(self._name, f"As {self._source.name}.", "counter")
        for values, count in sorted(totals.items()):
            yield f"{self._name}{format_labels(self._labels, values)} {count}"


class HistogramAlias:
    """A histogram under another name, summed over the labels that the alias does not have."""

    def __init__(
        self, name: str, source: Histogram, labels: Sequence[str], select: SelectLabels
    ) -> None:
        self._name, self._source = name, source
        self._labels, self._select = tuple(labels), select

    def lines(self) -> Iterator[str]:
        """Yield the family in Prometheus' text format."""
        totals: dict[tuple[str, ...], HistogramValue] = {}
        for labels, value in self._source.items():
            total = totals.setdefault(self._select(labels), HistogramValue(self._source.bounds))
            total.counts = [a + b for a, b in zip(total.counts, value.counts, strict=True)]
            total.total_s += value.total_s
        yield from family_header(self._name, f"As {self._source.name}.", "histogram")
        for values, total in sorted(totals.items(), key=_BY_LABEL_VALUES):
            yield from histogram_lines(
                self._name,
                self._labels,
                values,
                bounds=self._source.bounds,
                counts=total.counts,
                total_s=total.total_s,
            )


@dataclass(frozen=True, slots=True)
class GaugeAlias:
    """Numbers that are read when they are exported, by their label values, under the name of another system."""

    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[], Mapping[tuple[str, ...], float]]
    type: Literal["gauge", "counter"] = "gauge"

    def lines(self) -> Iterator[str]:
        """Yield the family in Prometheus' text format."""
        yield from family_header(self.name, self.help, self.type)
        for values, number in sorted(self.read().items()):
            yield f"{self.name}{format_labels(self.labels, values)} {number:.12g}"


def render(families: Iterable[MetricFamily]) -> str:
    """Return the families in Prometheus' text format."""
    return "".join(f"{line}\n" for family in families for line in family.lines())


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a text: a name, its labels and its value as text."""

    name: str
    labels: Mapping[str, str]
    value: str


def parse_samples(text: str, names: Container[str] | None = None) -> Iterator[Sample]:
    """Yield the samples, only those of `names` if it is given; lines that are not samples are skipped.

    Takes time linear in the text's length.
    """
    for found in _SAMPLE.finditer(text):
        if names is None or found[1] in names:
            yield Sample(found[1], _parse_labels(found[2] or ""), found[3])


def _parse_labels(text: str) -> dict[str, str]:
    labels, at = {}, 0
    # One label after another from the start: a search would take a time quadratic in a hostile text's length.
    while (label := _LABEL.match(text, at)) is not None:
        labels[label[1]] = _unescape_label_value(label[2])
        at = label.end()
    return labels


def _unescape_label_value(text: str) -> str:
    return _ESCAPE.sub(lambda found: _ESCAPES[found[0]], text) if "\\" in text else text
