"""Tables of plain text, aligned in terminal cells by tabulate. Pure."""

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

# As kubectl (k8s.io/cli-runtime, pkg/printers/tabwriter.go): columns of at least 3 characters, 3 spaces between.
_MIN_WIDTH = 3
# tabulate would end a line at each of these.
_OTHER_LINE_ENDS = dict.fromkeys(map(ord, "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")


def widths(
    rows: Sequence[Sequence[str]], titles: Sequence[str] = (), before: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the widths of the columns in terminal cells, at least `before`."""
    from wcwidth import wcswidth  # noqa: PLC0415 - see align_columns

    lines = chain.from_iterable(map(_cell_lines, (titles, *rows)))
    found = [max(map(wcswidth, column)) for column in zip_longest(*lines, fillvalue="")]
    return tuple(max(_MIN_WIDTH, *pair) for pair in zip_longest(before, found, fillvalue=0))


def align_columns(
    rows: Sequence[Sequence[str]], titles: Sequence[str] = (), *, least: Sequence[int] = ()
) -> str:
    """Return the rows aligned in columns; `least` is the minimum width of each column."""
    # The import takes as long as the rest of `fleetctl get -o json`, which prints no table.
    from tabulate import tabulate  # noqa: PLC0415 - see above

    lines = chain.from_iterable(map(_cell_lines, [titles, *rows] if titles else rows))
    columns = list(zip_longest(*lines, fillvalue=""))
    if not columns:
        return ""
    # tabulate's time grows with its cells, so each column is one cell of many lines: a fifth of the time for 20,000
    # rows. The last line is as wide as the column must be, and is removed.
    cells = []
    for at, column in enumerate(columns):
        ruler = "0" * max((_MIN_WIDTH, *least[at : at + 1]))
        cells.append(" \n".join((*column, ruler, "")).translate(_OTHER_LINE_ENDS))
    text = tabulate([cells], tablefmt="plain", disable_numparse=True, preserve_whitespace=True)
    return "\n".join([line.rstrip() for line in text.split("\n")[:-1]])


def _cell_lines(cells: Sequence[str]) -> Iterable[Sequence[str]]:
    """Return the lines of a row: several if a cell has several."""
    if not any("\n" in cell for cell in cells):
        return (cells,)
    return zip_longest(*(cell.split("\n") for cell in cells), fillvalue="")
