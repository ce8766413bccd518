"""Comments of YAML texts: reads them with the fields that they belong to, and writes them beside the same fields again.

A comment on a line of its own belongs to the field below it, one after a value to the field on its line. Pure.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from manifests.trees import Path
from manifests.yaml import parser
from manifests.yaml.nodes import Mark, YamlNode

Identity: TypeAlias = tuple[object, ...]
"""A path in which list items have names in place of numbers."""

# Fields that name an item of a list.
_NAMES: Final = ("name", "node", "deployment", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldComments:
    """The comments of one field, each without its #."""

    above: tuple[str, ...] = ()
    beside: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentComments:
    """The comments of one document."""

    fields: Mapping[Path, FieldComments] = field(default_factory=dict)
    end: tuple[str, ...] = ()
    """Comments after its last field."""


NO_COMMENTS: Final = DocumentComments()


@dataclass(frozen=True, slots=True)
class _Comment:
    line: int
    text: str
    is_beside: bool


def read_comments(text: str, roots: Sequence[YamlNode]) -> list[DocumentComments]:
    """Return the comments of each document; `roots` are those that `parser.parse` returned for the text."""
    text = text.removeprefix("\ufeff")
    spans = parser.scalar_spans(text)
    separators = [
        number
        for number, start, line in _lines(text)
        if (line == "---" or line.startswith("--- ")) and not _is_inside(spans, start)
    ]
    comments = list(_comments(text, spans))
    return [
        _of_document(
            root,
            [
                comment
                for comment in comments
                if bisect_right(separators, comment.line)
                == bisect_right(separators, root.mark.line)
            ],
        )
        for root in roots
    ]


def with_comments(text: str, comments: DocumentComments) -> str:
    """Return one document's text, as `core_schema.dump` writes it, with comments above and beside its fields.

    Comments of fields that it does not have are left out.
    """
    if comments == NO_COMMENTS:
        return text
    [root] = parser.parse(text, "").documents
    lines = text.splitlines()
    inserted: dict[int, list[str]] = {}
    for path, mark in _places(root, ()):
        field_comments = comments.fields.get(path)
        if field_comments is None:
            continue
        # The mark of a list's item is after its dash.
        indent = mark.column - 1 - (2 if isinstance(path[-1], int) else 0)
        inserted.setdefault(mark.line - 1, []).extend(
            f"{' ' * indent}{_spell(c)}" for c in field_comments.above
        )
        if field_comments.beside:
            lines[mark.line - 1] += f"  {_spell(field_comments.beside)}"
    shown = [line for at, own in enumerate(lines) for line in (*inserted.get(at, ()), own)]
    return "".join(f"{line}\n" for line in (*shown, *map(_spell, comments.end)))


def comment_lines(notes: Iterable[str]) -> str:
    """Return the notes as comments, a line each; unprintable characters are replaced."""
    shown = ("".join(char if char.isprintable() else "?" for char in note) for note in notes)
    return "".join(f"# {note}\n" for note in shown)


def keep_comments(old: str, new: str) -> tuple[str, tuple[str, ...]]:
    """Return the new text of a document with the comments of the old one, and the comments whose fields are gone.

    Items of lists are the same if they have the same name, or as scalars the same value.
    """
    parsed = parser.parse(old, "")
    if parsed.problems or len(parsed.documents) != 1:
        return new, ()
    [root] = parsed.documents
    [comments] = read_comments(old, parsed.documents)
    [fresh] = parser.parse(new, "").documents
    paths = {identity: path for path, identity in _identities(fresh)}
    moved: dict[Path, FieldComments] = {}
    gone: list[str] = []
    for path, identity in _identities(root):
        comment = comments.fields.get(path)
        if comment is None:
            continue
        if identity in paths:
            moved[paths[identity]] = comment
        else:
            gone += [*comment.above, *([comment.beside] if comment.beside else [])]
    return with_comments(new, DocumentComments(fields=moved, end=comments.end)), tuple(gone)


def _spell(comment: str) -> str:
    return f"#{comment}"


def _lines(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield number, offset and content of each line."""
    start = 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        yield number, start, line.rstrip("\r\n")
        start += len(line)


def _is_inside(spans: Sequence[tuple[int, int]], at: int) -> bool:
    index = bisect_left(spans, (at + 1, 0)) - 1
    return index >= 0 and at < spans[index][1]


def _comments(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[_Comment]:
    for number, start, line in _lines(text):
        at = line.find("#")
        while at >= 0:
            is_begun = at == 0 or line[at - 1] in " \t"
            if is_begun and not _is_inside(spans, start + at):
                before = line[:at].strip()
                yield _Comment(number, line[at + 1 :].rstrip(), bool(before))
                break
            at = line.find("#", at + 1)


def _of_document(root: YamlNode, comments: Sequence[_Comment]) -> DocumentComments:
    places = sorted(
        _places(root, ()), key=lambda place: (place[1].line, place[1].column, len(place[0]))
    )
    starts = [mark.line for _, mark in places]
    above: dict[Path, list[str]] = {}
    beside: dict[Path, str] = {}
    end: list[str] = []
    for comment in comments:
        after = bisect_right(starts, comment.line)
        if comment.is_beside and after:
            path = places[after - 1][0]
            beside[path] = f"{beside[path]};{comment.text}" if path in beside else comment.text
        elif after < len(places):
            above.setdefault(places[after][0], []).append(comment.text)
        else:
            end.append(comment.text)
    fields = {
        path: FieldComments(above=tuple(above.get(path, ())), beside=beside.get(path, ""))
        for path in dict.fromkeys((*above, *beside))
    }
    return DocumentComments(fields=fields, end=tuple(end))


def _places(node: YamlNode, path: Path) -> Iterator[tuple[Path, Mark]]:
    """Yield the path and the place of each field and list item, in the order of the document."""
    if isinstance(node.content, dict):
        for key, entry in node.content.items():
            yield (*path, key), entry.mark
            yield from _places(entry.node, (*path, key))
    elif isinstance(node.content, list):
        for index, item in enumerate(node.content):
            yield (*path, index), item.mark
            yield from _places(item, (*path, index))


def _identities(
    node: YamlNode, path: Path = (), identity: Identity = ()
) -> Iterator[tuple[Path, Identity]]:
    """Yield the path and the identity of each field and list item."""
    if isinstance(node.content, dict):
        for key, entry in node.content.items():
            yield (*path, key), (*identity, key)
            yield from _identities(entry.node, (*path, key), (*identity, key))
    elif isinstance(node.content, list):
        seen: dict[object, int] = {}
        for index, item in enumerate(node.content):
            name = _name_of(item, index)
            seen[name] = seen.get(name, 0) + 1
            own = (*identity, name, seen[name])
            yield (*path, index), own
            yield from _identities(item, (*path, index), own)


def _name_of(item: YamlNode, index: int) -> object:
    if isinstance(item.content, dict):
        names = ((key, item.content[key].node.content) for key in _NAMES if key in item.content)
        return next(((key, name) for key, name in names if isinstance(name, str)), index)
    return index if isinstance(item.content, list) else ("=", item.content)
