"""Plain values from a parser's events, for texts in which there is nothing to say about any place. Does no I/O.

Whatever `builder.Builder` would complain of or must look at twice (anchors, tags, keys that are no texts, sizes beyond
measure) is left to it: who is told NotPlainError here asks there. Ten times as fast, for values without places are cheap.
"""

from functools import lru_cache
from typing import Protocol

from manifests import scalars
from manifests.builder import MAX_DEPTH, MAX_NODES
from manifests.tree import Tree


class NotPlainError(Exception):
    """There is something in the text that only the builder can judge."""


class Begun(Protocol):
    """Begins something that may have an anchor or a tag."""

    anchor: str | None
    tag: str | None


class Word(Begun, Protocol):
    """A scalar."""

    value: str
    style: str | None
    """How it is quoted; empty or None if it is not."""


class At(Protocol):
    """A place in the text."""

    index: int
    """In characters, from 0."""


class BegunMapping(Begun, Protocol):
    """Begins a mapping."""

    start_mark: At
    flow_style: bool | None
    """Whether it is in braces."""


class Trees:
    """Takes events, gathers the values of documents; those that hold nothing are left out."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.documents: list[Tree] = []
        self._above: list[tuple[dict[str, Tree] | list[Tree] | None, str | None]] = []
        # What is being filled, and of a mapping the key whose value is awaited.
        self._open: dict[str, Tree] | list[Tree] | None = None
        self._key: str | None = None
        self._count = 0

    def scalar(self, event: Word) -> None:
        """Take a scalar, which may be a key.

        Raises:
            NotPlainError: the builder must judge.

        """
        if event.anchor is not None or event.tag is not None:
            raise NotPlainError
        text = event.value
        value: scalars.Scalar = text
        if not event.style:
            value = _resolved(text) if len(text) < _LONG else _meaning(text)
        if self._key is None and isinstance(self._open, dict):
            if not isinstance(value, str) or value in self._open:
                raise NotPlainError
            self._key = value
            return
        self._put(value)

    def mapping(self, event: BegunMapping) -> None:
        """Begin a mapping.

        Raises:
            NotPlainError: the builder must judge.

        """
        # `["a":1]`: a pair without braces, which not every reader takes.
        if event.flow_style and self._text[event.start_mark.index] != "{":
            raise NotPlainError
        self._begin(event, {})

    def sequence(self, event: Begun) -> None:
        """Begin a list.

        Raises:
            NotPlainError: the builder must judge.

        """
        self._begin(event, [])

    def close(self, _event: object) -> None:
        """End the innermost mapping or list."""
        ended = self._open
        self._open, self._key = self._above.pop()
        if self._open is None:
            self.documents.append(ended)

    def _begin(self, event: Begun, made: "dict[str, Tree] | list[Tree]") -> None:
        if event.anchor is not None or event.tag is not None or len(self._above) >= MAX_DEPTH:
            raise NotPlainError
        if self._open is not None:
            if self._key is None and isinstance(self._open, dict):
                raise NotPlainError  # a key that is no text
            self._put(made)
        self._above.append((self._open, self._key))
        self._open = made
        self._key = None

    def _put(self, value: Tree) -> None:
        self._count += 1
        if self._count > MAX_NODES:
            raise NotPlainError
        into = self._open
        if isinstance(into, dict):
            assert self._key is not None
            into[self._key] = value
            self._key = None
        elif into is not None:
            into.append(value)
        elif value is not None:
            raise NotPlainError  # nobody's manifest, and readers differ about what ends it


def _meaning(text: str) -> scalars.Scalar:
    if text == "<<":
        raise NotPlainError  # a merge key, or a text: the builder knows
    try:
        return scalars.resolve(text)
    except ValueError as error:
        raise NotPlainError from error


# The same few words stand in every manifest, and ten thousand files are ten thousand parsers.
_resolved = lru_cache(maxsize=4096)(_meaning)
_LONG = 64
