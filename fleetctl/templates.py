"""`-o jsonpath=` and `-o custom-columns=`: the user's own formats. Pure but for files with them."""

from collections.abc import Sequence
from pathlib import Path

from fleetctl import jsonpath
from fleetctl.documents import Tree
from fleetctl.errors import FleetctlError
from fleetctl.formats import Format, Lines, Whole
from fleetctl.printers import Moment

_NONE = "<none>"


def parse(word: str, value: str) -> Format:
    """Return the format that `-o WORD=VALUE` says.

    Raises:
        FleetctlError: the value is no template, or names a file that cannot be read or holds none.

    """
    is_file = word.endswith("-file")
    text = _content(word, value) if is_file else value
    if not word.startswith("jsonpath"):
        return _columns_of_file(text, value) if is_file else _columns(text)
    if "{" not in text:
        raise FleetctlError(
            f"-o {word}: {text.strip()!r} has no braces, and so no path; write {{{text.strip()}}}"
        )
    return Whole(text=jsonpath.parse(text).text)


def _columns(text: str) -> Lines:
    """Return the columns of `NAME:.metadata.name,NODE:.spec.node`."""
    pairs = [part.partition(":") for part in text.split(",")]
    for title, _, path in pairs:
        if not title or not path:
            raise FleetctlError(
                f"-o custom-columns: {title or text!r} needs a title and a path; write TITLE:PATH with commas "
                "between several, such as NAME:.metadata.name,NODE:.spec.node"
            )
    return _lines([title for title, _, _ in pairs], [path for _, _, path in pairs])


def _columns_of_file(text: str, file: str) -> Lines:
    """Return the columns of a file: a line of titles, below each its path."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if len(lines) != 2 or len(lines[0]) != len(lines[1]):
        raise FleetctlError(
            f"{file}: expected a line with titles and a line with as many paths below them, such as "
            "`NAME NODE` and `.metadata.name .spec.node`"
        )
    return _lines(lines[0], lines[1])


def _lines(titles: Sequence[str], paths: Sequence[str]) -> Lines:
    parsed = [jsonpath.relaxed(path) for path in paths]

    def row(tree: Tree) -> tuple[str, ...]:
        return tuple(",".join(map(jsonpath.spelled, path.find(tree))) or _NONE for path in parsed)

    def rows(trees: Sequence[Tree], _: Moment) -> list[tuple[str, ...]]:
        return [row(tree) for tree in trees]

    return Lines(
        titles=lambda _: tuple(titles),
        rows=rows,
        essence=lambda tree, _: "\0".join(row(tree)),
    )


def _content(word: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FleetctlError(f"-o {word}={file}: the file cannot be read: {error}") from error
