"""Tables of plain text, aligned in terminal cells. Pure."""

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

# As kubectl (k8s.io/cli-runtime, pkg/printers/tabwriter.go): columns of at least 3 characters, 3 spaces between.
_GAP, _MIN_WIDTH = 3, 3


def widths(
    rows: Sequence[Sequence[str]], titles: Sequence[str] = (), before: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the widths of the columns in terminal cells, at least `before`."""
    lines = (titles, *rows)
    measure = len if _is_plain(lines) else _width
    cells = zip_longest(*lines, fillvalue="")
    found = [max(map(measure, column)) for column in cells]
    return tuple(max(_MIN_WIDTH, *pair) for pair in zip_longest(before, found, fillvalue=0))


def align_columns(
    rows: Sequence[Sequence[str]], titles: Sequence[str] = (), *, least: Sequence[int] = ()
) -> str:
    """Return the rows aligned in columns by tabulate; `least` is the minimum width of each column."""
    wide = widths(rows, titles, least)
    return _align_wide([titles, *rows] if titles else rows, wide)


def align_plain_columns(
    rows: Sequence[Sequence[str]], titles: Sequence[str] = (), *, least: Sequence[int] = ()
) -> str:
    """Return what `align_columns` does, without tabulate where no cell needs it.

    For `fleetctl get`, and for programs that print table after table: the import of tabulate takes as long as all else.
    """
    wide = widths(rows, titles, least)
    lines = [titles, *rows] if titles else rows
    if not _is_plain(lines):
        return _align_wide(lines, wide)
    template = "".join(f"%-{width + _GAP}s" for width in wide)
    if any(len(line) != len(wide) for line in lines):
        lines = [(*line, *[""] * (len(wide) - len(line))) for line in lines]
    return "\n".join([(template % tuple(line)).rstrip() for line in lines])


def _is_plain(lines: Iterable[Sequence[str]]) -> bool:
    """Return whether each letter is a column wide, and no cell has several lines."""
    letters = "".join(chain.from_iterable(lines))
    return letters.isascii() and "\n" not in letters


def _align_wide(lines: Sequence[Sequence[str]], wide: Sequence[int]) -> str:
    """Align cells with wide characters or several lines, by means of tabulate."""
    # Its import takes as long as the rest of `fleetctl get`.
    from tabulate import DataRow, TableFormat, tabulate  # noqa: PLC0415 - see above

    gaps = DataRow("", " " * _GAP, "")
    options = TableFormat(None, None, None, None, gaps, gaps, 0, None)
    ruler = ["0" * width for width in wide]
    parts = [zip_longest(*(cell.split("\n") for cell in line), fillvalue="") for line in lines]
    text = tabulate(
        [*chain.from_iterable(parts), ruler],
        tablefmt=options,
        disable_numparse=True,
        preserve_whitespace=True,
    )
    return "\n".join(line.rstrip() for line in text.splitlines()[:-1])


def _width(cell: str) -> int:
    """Return the width of the longest line of a cell in terminal cells."""
    if "\n" in cell:
        return max(map(_width, cell.split("\n")))
    if cell.isascii():
        return len(cell)
    from wcwidth import wcswidth  # noqa: PLC0415 - as tabulate, which measures with it

    return wcswidth(cell)
