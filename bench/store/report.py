"""The figures, as tables for people and as one flat object for machines: ratios first. Pure.

`..._vs_fastest` compares speeds with the fastest peer's: 0.9 is ten percent slower. `..._vs_least`
compares costs with the cheapest peer's: 1.1 is ten percent dearer. Names of ours without a suffix
are of the default transport, with `_http` of the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tabulate import tabulate

from bench.store.cases import CONCURRENCIES, COUNTS
from bench.store.ways import OURS, Way

UNARY = tuple(f"{verb}_c{at_once}" for verb in ("put", "get") for at_once in CONCURRENCIES)
_DEFAULT, _OTHER = OURS


@dataclass
class Results:
    """The median figures of each client in each case, and why others have none."""

    ways: Sequence[Way]
    figures: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    notes: dict[tuple[str, str], str] = field(default_factory=dict)

    def of(self, case: str, name: str, figure: str) -> float | None:
        return self.figures.get((case, name), {}).get(figure)

    def best_peer(
        self, case: str, figure: str, choose: Callable[..., float], *, http_only: bool = False
    ) -> float | None:
        found = [
            value
            for way in self.ways
            if not way.is_ours and (way.is_http or not http_only)
            if (value := self.of(case, way.name, figure)) is not None
        ]
        return choose(found) if found else None


@dataclass(frozen=True)
class Column:
    """One figure of one case, as a table shows it."""

    title: str
    case: str
    figures: tuple[str, ...]
    form: str = "{:.0f}"


def _shared(figures: tuple[str, ...], form: str) -> list[Column]:
    return [Column(case.replace("_", " "), case, figures, form) for case in UNARY]


_LISTS = [
    [
        Column("wire ms", f"list_{count}", ("wire_ms",)),
        Column("Python CPU ms", f"list_{count}", ("wire_python_ms",)),
        Column("etcd CPU ms", f"list_{count}", ("etcd_ms",)),
        Column("decoding CPU ms", f"list_{count}", ("decode_ms",)),
        Column("both ms", f"list_{count}", ("whole_ms",)),
        Column("decoding: of time", f"list_{count}", ("decode_share_of_time",), "{:.0%}"),
        Column("of Python CPU", f"list_{count}", ("decode_share_of_cpu",), "{:.0%}"),
    ]
    for count in COUNTS
]
_EVENTS = [
    Column("put to handler p50 ms", "latency", ("p50_ms",), "{:.2f}"),
    Column("p99 ms", "latency", ("p99_ms",), "{:.1f}"),
    Column("1,000 puts to 20 watches s", "fanout_watch", ("seconds",), "{:.2f}"),
    Column("CPU s", "fanout_watch", ("python_s", "etcd_s"), "{:.2f} / {:.2f}"),
    Column("lost", "fanout_watch", ("lost",)),
    Column("to 20 informers s", "fanout_informer", ("seconds",), "{:.2f}"),
    Column("CPU s", "fanout_informer", ("python_s", "etcd_s"), "{:.2f} / {:.2f}"),
]
_PERCENT = ("python_percent", "etcd_percent")
_LEASES = [
    Column("CPU %", "leases", _PERCENT, "{:.0f} / {:.0f}"),
    Column("us a renewal", "leases", ("python_us", "etcd_us"), "{:.0f} / {:.0f}"),
    Column("late", "leases", ("late",)),
    Column("a connection each: CPU %", "leases_apart", _PERCENT, "{:.0f} / {:.0f}"),
    Column("us a renewal", "leases_apart", ("python_us", "etcd_us"), "{:.0f} / {:.0f}"),
    Column("late", "leases_apart", ("late",)),
    Column("connections", "leases_apart", ("connections",)),
]
TABLES: tuple[tuple[str, Sequence[Column]], ...] = (
    ("operations per second", _shared(("per_s",), "{:.0f}")),
    ("CPU us per operation, Python / etcd", _shared(("python_us", "etcd_us"), "{:.0f} / {:.0f}")),
    ("watches (ours: latency by an informer, which decodes); CPU is Python / etcd", _EVENTS),
    ("1,000 leases of 4 s, each renewed three times in that; CPU is Python / etcd", _LEASES),
    *(
        (f"list of {count} objects in pages, and decoding them", columns)
        for count, columns in zip(COUNTS, _LISTS, strict=True)
    ),
)


def tables(results: Results) -> str:
    """Return all tables, then who is missing where, and why."""
    parts = []
    for title, columns in TABLES:
        rows = [
            [way.name, *cells]
            for way in results.ways
            if any(cells := [_cell(results, way, column) for column in columns])
        ]
        headers = ["client", *(column.title for column in columns)]
        parts.append(f"{title}\n{tabulate(rows, headers, disable_numparse=True)}")
    reasons: dict[tuple[str, str], list[str]] = {}
    for (name, case), why in results.notes.items():
        reasons.setdefault((name, why), []).append(case)
    lines = [f"{name}: {', '.join(at)}: {why}" for (name, why), at in reasons.items()]
    return "\n\n".join([*parts, "\n".join(["not measured:", *lines])])


def _cell(results: Results, way: Way, column: Column) -> str:
    figure = results.figures.get((column.case, way.name))
    if figure is None:
        return ""
    return column.form.format(*(figure[name] for name in column.figures))


def verdicts(results: Results) -> list[str]:
    """Return what the choice of the transport hangs on, in words."""
    lines, ratios = [], _of_transports(results)
    for case, what in (("leases", "one connection"), ("leases_apart", "a connection each")):
        python, etcd = (
            ratios.get(f"{case}_{who}_cpu_grpc_over_http") for who in ("python", "etcd")
        )
        if python is not None and etcd is not None:
            lines.append(
                f"leases, {what}: gRPC costs {python:.2f} of HTTP's Python CPU, {etcd:.2f} of its etcd CPU"
            )
    return lines


def failures(results: Results) -> dict[str, str]:
    """Return why clients have no figures, other than what they are known not to take part in."""
    failed: dict[str, str] = {}
    for way in results.ways:
        for (name, case), why in results.notes.items():
            if name == way.name and why != way.reason_to_skip(case):
                failed.setdefault(name, f"{case}: {why}")
    return failed


def figures(results: Results) -> dict[str, float]:
    """Return how our two transports compare, and what their figures are."""
    absolute = {
        f"{case}_{name.removeprefix('ours ')}_{figure}": value
        for (case, name), found in results.figures.items()
        if name.startswith("ours ")
        for figure, value in found.items()
    }
    rounded = {name: round(value, 2 if value < 100 else 0) for name, value in absolute.items()}
    return {**_of_transports(results), **rounded}


def _of_transports(results: Results) -> dict[str, float]:
    """Return what leases cost over gRPC, as a part of what they cost over HTTP."""
    found: dict[str, float] = {}
    for case in ("leases", "leases_apart"):
        for whose in ("python", "etcd"):
            grpc, http = (results.of(case, way.name, f"{whose}_us") for way in OURS)
            if grpc is not None and http:
                found[f"{case}_{whose}_cpu_grpc_over_http"] = round(grpc / http, 2)
    return found


def ratios(results: Results) -> dict[str, float]:
    """Return how ours compare with the best peer in each case."""
    found: dict[str, float] = {}

    def note(name: str, ours: float | None, other: float | None) -> None:
        if ours is not None and other:
            found[name] = round(ours / other, 2)

    for suffix, way in (("", _DEFAULT), ("_http", _OTHER)):
        for case, speeds, costs in _comparisons():
            for label, figure in speeds:
                ours = results.of(case, way.name, figure)
                note(f"{case}{label}{suffix}_vs_fastest", *_speed(results, case, figure, ours))
            for label, figure in costs:
                ours = results.of(case, way.name, figure)
                note(f"{case}{label}{suffix}_vs_least", ours, results.best_peer(case, figure, min))
    for case in UNARY:
        ours = results.of(case, _OTHER.name, "python_us")
        least = results.best_peer(case, "python_us", min, http_only=True)
        note(f"{case}_cpu_http_vs_least_http", ours, least)
    return found


def _speed(
    results: Results, case: str, figure: str, ours: float | None
) -> tuple[float | None, float | None]:
    """Return two numbers whose quotient is the ratio of speeds: times are turned over."""
    if figure == "per_s":
        return ours, results.best_peer(case, figure, max)
    return results.best_peer(case, figure, min), ours


Labels = tuple[tuple[str, str], ...]


def _comparisons() -> list[tuple[str, Labels, Labels]]:
    """Return by case which figures are speeds (and times), and which are costs."""
    cpu: Labels = (("_cpu", "python_us"), ("_etcd_cpu", "etcd_us"))
    listing: Labels = (("_wire_cpu", "wire_python_ms"), ("_cpu", "whole_python_ms"))
    return [
        *((case, (("", "per_s"),), cpu) for case in UNARY),
        ("latency", (("_p50", "p50_ms"), ("_p99", "p99_ms")), ()),
        ("fanout_watch", (("", "seconds"),), (("_cpu", "python_s"),)),
        ("leases", (), cpu),
        *((f"list_{count}", (("_wire", "wire_ms"), ("", "whole_ms")), listing) for count in COUNTS),
    ]
