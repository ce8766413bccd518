"""Reads a JSONPath from left to right. Knows no grammar but quotes and blanks."""

import re

from fleetctl.errors import FleetctlError

_QUOTED = re.compile(r"'((?:\\.|[^'\\])*)'|\"((?:\\.|[^\"\\])*)\"")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


class Cursor:
    """A text, and how far it has been read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def quoted(self) -> str | None:
        self.skip_blanks()
        found = _QUOTED.match(self.rest())
        if found is None:
            return None
        self.at += found.end()
        text = found[1] if found[1] is not None else found[2]
        return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), text)

    def rest(self) -> str:
        return self.text[self.at :]

    def skip_blanks(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def took(self, word: str) -> bool:
        self.skip_blanks()
        return self.took_here(word)

    def took_here(self, word: str) -> bool:
        is_there = self.text.startswith(word, self.at)
        self.at += len(word) if is_there else 0
        return is_there

    def wrong(self, what: str) -> FleetctlError:
        return FleetctlError(
            f"jsonpath {self.text}: {what} (at character {self.at + 1}). Write it as kubectl has it, "
            'such as {.metadata.name} or {range .items[*]}{.metadata.name}{"\\n"}{end}'
        )
