r"""kubectl's JSONPath: `{range .items[*]}{.metadata.name}{"\n"}{end}`, from text to what it finds. Pure.

The language is that of k8s.io/client-go/util/jsonpath: texts between braces, quoted texts, `range` and `end`,
fields, `[*]`, `[n]`, slices, unions, filters, `..`, `$` and `@`. A field that is not there is empty, as in kubectl
get; a place that a list does not have is an error, but for paths on their own (`relaxed`).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fleetctl.jsonparts.cursor import Cursor
from fleetctl.jsonparts.steps import (
    OPERATORS,
    Constant,
    Deep,
    Every,
    Field,
    Filter,
    Operand,
    Path,
    Slice,
    Step,
    Union,
)

_NAME = re.compile(r"(?:\\.|[^\s.\[\](){}'\"=!<>,|&\\])+")
_SLICE = re.compile(r"(-?\d+)?(?::(-?\d+)?(?::(-?\d+)?)?)?")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_DEEPEST = 50


@dataclass(frozen=True, slots=True)
class Range:
    """`{range PATH}...{end}`: what is between, for each that the path finds."""

    path: Path
    parts: tuple["Part", ...]


Part: TypeAlias = str | Path | Range


@dataclass(frozen=True, slots=True)
class Template:
    """A text with paths in it."""

    parts: tuple[Part, ...]

    def text(self, tree: Any) -> str:
        """Return the text for a tree: several values of one path have blanks between them.

        Raises:
            FleetctlError: a list is too short for an index or a slice.

        """
        return _text(self.parts, tree, tree)


def parse(text: str) -> Template:
    """Return the template that is spelled so.

    Raises:
        FleetctlError: it is none; says where.

    """
    return _Parser(text).template()


def relaxed(text: str) -> Path:
    """Return one path, written as `{.a.b}`, `.a.b` or `a.b`.

    It is for columns, sorting and waiting, where one object may lack what others have: it finds nothing there.

    Raises:
        FleetctlError: it is none; says where.

    """
    bare = text.strip()
    bare = bare[1:-1].strip() if bare.startswith("{") and bare.endswith("}") else bare
    path = bare if bare.startswith((".", "[", "$", "@")) else f".{bare}"
    parser = _Parser(path, is_bounded=False)
    return parser.whole_path()


def spelled(value: Any) -> str:
    """Return a value as it is printed: texts bare, the rest as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _text(parts: Sequence[Part], tree: Any, root: Any) -> str:
    found: list[str] = []
    for part in parts:
        if isinstance(part, str):
            found.append(part)
        elif isinstance(part, Range):
            found += [_text(part.parts, one, root) for one in part.path.found(tree, root)]
        else:
            found.append(" ".join(map(spelled, part.found(tree, root))))
    return "".join(found)


class _Parser:
    """Makes a template, or a path, of what a cursor reads."""

    def __init__(self, text: str, *, is_bounded: bool = True) -> None:
        self._cursor = Cursor(text)
        self._is_bounded = is_bounded

    def template(self) -> Template:
        parts = self._parts(depth=0)
        return Template(parts)

    def whole_path(self) -> Path:
        path = self._path()
        if self._cursor.at < len(self._cursor.text):
            raise self._cursor.wrong("nothing may follow the path")
        return path

    def _parts(self, *, depth: int) -> tuple[Part, ...]:
        """Read until the text's end, or until the `{end}` of a range."""
        if depth > _DEEPEST:
            raise self._cursor.wrong(f"has more than {_DEEPEST} ranges in each other")
        found: list[Part] = []
        while self._cursor.at < len(self._cursor.text):
            plain, brace, _ = self._cursor.rest().partition("{")
            found += [plain] if plain else []
            self._cursor.at += len(plain) + len(brace)
            while brace and not self._cursor.took("}"):
                if self._cursor.took("end"):
                    self._closed("end")
                    if not depth:
                        raise self._cursor.wrong("there is an end without a range")
                    return tuple(found)
                if not self._cursor.rest():
                    raise self._cursor.wrong("expected }")
                found.append(self._part(depth))
                if isinstance(found[-1], Range):
                    break  # the braces of its {end} are closed
        if depth:
            raise self._cursor.wrong("a range has no {end}")
        return tuple(found)

    def _part(self, depth: int) -> Part:
        """Read one thing within braces."""
        if re.match(r"range\b", self._cursor.rest()):
            self._cursor.at += len("range")
            path = self._path()
            self._closed("range PATH")
            return Range(path, self._parts(depth=depth + 1))
        quoted = self._cursor.quoted()
        return self._path() if quoted is None else quoted

    def _closed(self, what: str) -> None:
        if not self._cursor.took("}"):
            raise self._cursor.wrong(f"expected }} after {what}")

    def _path(self) -> Path:
        self._cursor.skip_blanks()
        is_from_root = self._cursor.took("$")
        is_here = is_from_root or self._cursor.took("@")
        start, steps = self._cursor.at, []
        while self._cursor.rest()[:1] in (".", "["):
            steps += self._steps()
        if self._cursor.at == start and not is_here:
            name = _NAME.match(self._cursor.rest())
            if name is None:
                raise self._cursor.wrong("expected a path such as .metadata.name")
            raise self._cursor.wrong(f"write .{name.group()} for a field, or quotes around a text")
        return Path(tuple(steps), is_from_root=is_from_root)

    def _steps(self) -> list[Step]:
        """Read `.name`, `.*`, `..` or `[...]`."""
        if self._cursor.took_here("["):
            return [self._bracket()]
        if self._cursor.took_here(".."):
            named = self._cursor.rest()[:1] not in ("[", "")
            return [Deep(), self._named()] if named else [Deep()]
        self._cursor.took_here(".")
        if self._cursor.rest()[:1] in ("[", "", "}", " "):  # `.[0]`; `{.}` is the whole
            return []
        return [self._named()]

    def _named(self) -> Step:
        if self._cursor.took_here("*"):
            return Every()
        found = _NAME.match(self._cursor.rest())
        if found is None:
            raise self._cursor.wrong("expected a field's name")
        self._cursor.at += found.end()
        return Field(re.sub(r"\\(.)", r"\1", found.group()))

    def _bracket(self) -> Step:
        if self._cursor.took("?"):
            return self._filter()
        steps = [self._choice()]
        while self._cursor.took(","):
            steps.append(self._choice())
        if not self._cursor.took("]"):
            raise self._cursor.wrong("expected ]")
        return steps[0] if len(steps) == 1 else Union(tuple(steps))

    def _choice(self) -> Step:
        """Read one of the things that may stand in brackets."""
        if self._cursor.took("*"):
            return Every()
        name = self._cursor.quoted()
        if name is not None:
            return Field(name)
        self._cursor.skip_blanks()
        found = _SLICE.match(self._cursor.rest())
        if found is None or not found.group():
            raise self._cursor.wrong(
                "expected a number, a slice such as 1:3, *, a quoted name or ?(...)"
            )
        self._cursor.at += found.end()
        first, last, step = (None if n is None else int(n) for n in found.groups())
        if step is not None and step <= 0:
            raise self._cursor.wrong("the step of a slice must be more than 0")
        if ":" not in found.group():
            last = None if first == -1 else (first or 0) + 1
        return Slice(slice(first, last, step), is_bounded=self._is_bounded)

    def _filter(self) -> Step:
        if not self._cursor.took("("):
            raise self._cursor.wrong("expected ( after ?")
        left = self._operand()
        sign = next((sign for sign in OPERATORS if self._cursor.took(sign)), "")
        right = self._operand() if sign else None
        if not (self._cursor.took(")") and self._cursor.took("]")):
            raise self._cursor.wrong('expected )], as in [?(@.type=="Ready")]')
        return Filter(left, sign, right)

    def _operand(self) -> Operand:
        quoted = self._cursor.quoted()
        if quoted is not None:
            return Constant(quoted)
        number = _NUMBER.match(self._cursor.rest())
        if number is not None:
            self._cursor.at += number.end()
            return Constant(float(number.group()))
        for word, value in (("true", True), ("false", False)):
            if self._cursor.took(word):
                return Constant(value)
        return self._path()
