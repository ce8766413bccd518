"""The text that an editor opens: notes of ours on top, which go again, and the user's own text, kept to the byte. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from manifests.errors import ManifestError

_MARK = "#|"

HOW = (
    'Edit below, save, and leave the editor. Lines that begin with "#|" at the top are not part of it.',
    "An empty file ends the edit, and so does leaving it as it is. What is wrong is told here.",
)


def with_notes(notes: Sequence[str], body: str) -> str:
    """Return the text to open."""
    return "".join(f"{line}\n" for line in marked(notes)) + body


def without_notes(notes: Sequence[str], text: str) -> str:
    """Return what the user wrote: the text without those of our notes that are left at its top.

    Only lines that we wrote go, in their order: a comment of the user's stays, whatever it begins with.
    """
    ours, at = marked(notes), 0
    while True:
        line, newline, rest = text.partition("\n")
        line = line.removesuffix("\r")
        if not line.startswith(_MARK) or line not in ours[at:]:
            return text
        at = ours.index(line, at) + 1
        text = rest
        if not newline:
            return text


def marked(notes: Sequence[str]) -> list[str]:
    """Return the notes as lines of the text, an empty one last."""
    lines = [line for note in notes for line in note.splitlines()]
    return [*(f"{_MARK} {line}".rstrip() for line in lines), _MARK] if lines else []


def is_empty(body: str) -> bool:
    """Return whether nothing was left but comments and marks of documents."""
    lines = (line.strip() for line in body.splitlines())
    return all(not line or line.startswith("#") or line == "---" for line in lines)


def complaints(head: str, problems: Sequence[ManifestError]) -> list[str]:
    """Return the notes that say what is wrong, at the lines that it has below these very notes."""
    ordered = sorted(problems, key=lambda one: (one.line, one.column))
    # How many lines notes take does not depend on the numbers in them.
    below = len(marked([*HOW, head, *(str(_at(one, 0)) for one in ordered)]))
    return [*HOW, head, *(str(_at(one, below)) for one in ordered)]


def _at(problem: ManifestError, below: int) -> ManifestError:
    """Return the problem with its place in words: the file is of no interest to who has it open."""
    place = f"line {problem.line + below}" if problem.line else ""
    return replace(problem, source=place, line=0, column=0)
