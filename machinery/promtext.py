"""Prometheus' text form, line by line. Pure; keeps no figures."""

from collections.abc import Iterator, Sequence
from itertools import accumulate


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
        yield f"{name}_bucket{labelled((*labels, 'le'), (*values, end))} {total}"
    yield f"{name}_sum{labelled(labels, values)} {total_s:.6f}"
    yield f"{name}_count{labelled(labels, values)} {sum(counts)}"


def head(name: str, help_: str, type_: str) -> tuple[str, str]:
    """Return the two lines before a family's figures."""
    return f"# HELP {name} {help_}", f"# TYPE {name} {type_}"


def labelled(names: Sequence[str], values: Sequence[str]) -> str:
    """Return labels in braces; nothing if there are none."""
    if not names:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
