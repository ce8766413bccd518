r"""Reads a JSONPath from left to right. Knows no grammar but quotes and blanks.

The steps of a JSONPath, and what each finds in a tree. Pure; parses nothing.

kubectl's JSONPath: `{range .items[*]}{.metadata.name}{"\n"}{end}`, from text to what it finds. Pure.

The language is that of k8s.io/client-go/util/jsonpath: texts between braces, quoted texts, `range` and `end`,
fields, `[*]`, `[n]`, slices, unions, filters, `..`, `$` and `@`. A field that is not there is empty, as in kubectl
get; a place that a list does not have is an error, but for paths on their own (`relaxed`).
"""

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fleetctl.cli.errors import FleetctlError

_QUOTED = re.compile(r"'((?:\\.|[^'\\])*)'|\"((?:\\.|[^\"\\])*)\"")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


class TextCursor:
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


@dataclass(frozen=True, slots=True)
class FieldStep:
    """`.name` or `['name']`."""

    name: str

    def found(self, value: Any, _: Any) -> Iterator[Any]:
        if isinstance(value, Mapping) and self.name in value:
            yield value[self.name]


@dataclass(frozen=True, slots=True)
class WildcardStep:
    """`.*` or `[*]`."""

    def found(self, value: Any, _: Any) -> Iterator[Any]:
        yield from _children(value)


@dataclass(frozen=True, slots=True)
class RecursiveStep:
    """`..`: the value, and all below it."""

    def found(self, value: Any, root: Any) -> Iterator[Any]:
        yield value
        for part in _children(value):
            yield from self.found(part, root)


@dataclass(frozen=True, slots=True)
class SliceStep:
    """`[2]`, `[-1]`, `[1:3]`, `[::2]`."""

    cut: slice
    is_bounded: bool = True
    """Whether places that a list does not have are refused; else there is nothing in them."""

    def found(self, value: Any, _: Any) -> Iterator[Any]:
        """Yield the parts of a list.

        Raises:
            FleetctlError: it has no such places.

        """
        if isinstance(value, list):
            if self.is_bounded:
                self._refuse_beyond(len(value))
            yield from value[self.cut]

    def _refuse_beyond(self, length: int) -> None:
        """Refuse places as client-go's evalArray does: of nothing asked for, none is wrong."""
        first, last = (_index_from_start(n, length) for n in (self.cut.start, self.cut.stop))
        first, last = first or 0, length if last is None else last
        if first == last:
            return
        beyond = first if not 0 <= first < length else last - 1
        if not 0 <= beyond < length:
            raise FleetctlError(f"array index out of bounds: index {beyond}, length {length}")


@dataclass(frozen=True, slots=True)
class UnionStep:
    """`[0,2]`, `['a','b']`: what each finds, one after the other."""

    steps: tuple["Step", ...]

    def found(self, value: Any, root: Any) -> Iterator[Any]:
        for step in self.steps:
            yield from step.found(value, root)


_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
OPERATORS = tuple(_OPERATORS)


@dataclass(frozen=True, slots=True)
class FilterStep:
    """`[?(@.name == "x")]`, `[?(@.name)]`: the parts for which it is true."""

    left: "Operand"
    operator: str = ""
    right: "Operand | None" = None

    def found(self, value: Any, root: Any) -> Iterator[Any]:
        for part in _children(value):
            if self._holds(part, root):
                yield part

    def _holds(self, part: Any, root: Any) -> bool:
        left = self.left.found(part, root)
        if self.right is None:
            return bool(left)
        right = self.right.found(part, root)
        if not left or not right:
            return False
        try:
            return bool(_OPERATORS[self.operator](left[0], right[0]))
        except TypeError:  # as kubectl: what cannot be compared is not it
            return False


@dataclass(frozen=True, slots=True)
class FieldPath:
    """A path: from the value at hand, or from the root."""

    steps: tuple["Step", ...]
    is_from_root: bool = False

    def find(self, tree: Any) -> list[Any]:
        """Return everything that it leads to in a tree."""
        return self.found(tree, tree)

    def found(self, value: Any, root: Any) -> list[Any]:
        here = [root if self.is_from_root else value]
        for step in self.steps:
            here = [found for one in here for found in step.found(one, root)]
        return here


@dataclass(frozen=True, slots=True)
class ConstantOperand:
    """A text, number or truth value to compare with."""

    value: Any

    def found(self, _: Any, __: Any) -> list[Any]:
        return [self.value]


Step: TypeAlias = FieldStep | WildcardStep | RecursiveStep | SliceStep | UnionStep | FilterStep
Operand: TypeAlias = FieldPath | ConstantOperand


def _index_from_start(place: int | None, length: int) -> int | None:
    return place if place is None or place >= 0 else place + length


def _children(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else ()


_NAME_PATTERN = re.compile(r"(?:\\.|[^\s.\[\](){}'\"=!<>,|&\\])+")
_SLICE_PATTERN = re.compile(r"(-?\d+)?(?::(-?\d+)?(?::(-?\d+)?)?)?")
_NUMBER_PATTERN = re.compile(r"-?\d+(?:\.\d+)?")
_MAX_DEPTH = 50


@dataclass(frozen=True, slots=True)
class RangeBlock:
    """`{range PATH}...{end}`: what is between, for each that the path finds."""

    path: FieldPath
    parts: tuple["TemplatePart", ...]


TemplatePart: TypeAlias = str | FieldPath | RangeBlock


@dataclass(frozen=True, slots=True)
class PathTemplate:
    """A text with paths in it."""

    parts: tuple[TemplatePart, ...]

    def text(self, tree: Any) -> str:
        """Return the text for a tree: several values of one path have blanks between them.

        Raises:
            FleetctlError: a list is too short for an index or a slice.

        """
        return _render_parts(self.parts, tree, tree)


def parse(text: str) -> PathTemplate:
    """Return the template that is spelled so.

    Raises:
        FleetctlError: it is none; says where.

    """
    return _Parser(text).template()


def parse_path(text: str) -> FieldPath:
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


def format_value(value: Any) -> str:
    """Return a value as it is printed: texts bare, the rest as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _render_parts(parts: Sequence[TemplatePart], tree: Any, root: Any) -> str:
    found: list[str] = []
    for part in parts:
        if isinstance(part, str):
            found.append(part)
        elif isinstance(part, RangeBlock):
            found += [_render_parts(part.parts, one, root) for one in part.path.found(tree, root)]
        else:
            found.append(" ".join(map(format_value, part.found(tree, root))))
    return "".join(found)


class _Parser:
    """Makes a template, or a path, of what a cursor reads."""

    def __init__(self, text: str, *, is_bounded: bool = True) -> None:
        self._cursor = TextCursor(text)
        self._is_bounded = is_bounded

    def template(self) -> PathTemplate:
        parts = self._parts(depth=0)
        return PathTemplate(parts)

    def whole_path(self) -> FieldPath:
        path = self._path()
        if self._cursor.at < len(self._cursor.text):
            raise self._cursor.wrong("nothing may follow the path")
        return path

    def _parts(self, *, depth: int) -> tuple[TemplatePart, ...]:
        """Read until the text's end, or until the `{end}` of a range."""
        if depth > _MAX_DEPTH:
            raise self._cursor.wrong(f"has more than {_MAX_DEPTH} ranges in each other")
        found: list[TemplatePart] = []
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
                if isinstance(found[-1], RangeBlock):
                    break  # the braces of its {end} are closed
        if depth:
            raise self._cursor.wrong("a range has no {end}")
        return tuple(found)

    def _part(self, depth: int) -> TemplatePart:
        """Read one thing within braces."""
        if re.match(r"range\b", self._cursor.rest()):
            self._cursor.at += len("range")
            path = self._path()
            self._closed("range PATH")
            return RangeBlock(path, self._parts(depth=depth + 1))
        quoted = self._cursor.quoted()
        return self._path() if quoted is None else quoted

    def _closed(self, what: str) -> None:
        if not self._cursor.took("}"):
            raise self._cursor.wrong(f"expected }} after {what}")

    def _path(self) -> FieldPath:
        self._cursor.skip_blanks()
        is_from_root = self._cursor.took("$")
        is_here = is_from_root or self._cursor.took("@")
        start, steps = self._cursor.at, []
        while self._cursor.rest()[:1] in (".", "["):
            steps += self._steps()
        if self._cursor.at == start and not is_here:
            name = _NAME_PATTERN.match(self._cursor.rest())
            if name is None:
                raise self._cursor.wrong("expected a path such as .metadata.name")
            raise self._cursor.wrong(f"write .{name.group()} for a field, or quotes around a text")
        return FieldPath(tuple(steps), is_from_root=is_from_root)

    def _steps(self) -> list[Step]:
        """Read `.name`, `.*`, `..` or `[...]`."""
        if self._cursor.took_here("["):
            return [self._bracket()]
        if self._cursor.took_here(".."):
            named = self._cursor.rest()[:1] not in ("[", "")
            return [RecursiveStep(), self._named()] if named else [RecursiveStep()]
        self._cursor.took_here(".")
        if self._cursor.rest()[:1] in ("[", "", "}", " "):  # `.[0]`; `{.}` is the whole
            return []
        return [self._named()]

    def _named(self) -> Step:
        if self._cursor.took_here("*"):
            return WildcardStep()
        found = _NAME_PATTERN.match(self._cursor.rest())
        if found is None:
            raise self._cursor.wrong("expected a field's name")
        self._cursor.at += found.end()
        return FieldStep(re.sub(r"\\(.)", r"\1", found.group()))

    def _bracket(self) -> Step:
        if self._cursor.took("?"):
            return self._filter()
        steps = [self._choice()]
        while self._cursor.took(","):
            steps.append(self._choice())
        if not self._cursor.took("]"):
            raise self._cursor.wrong("expected ]")
        return steps[0] if len(steps) == 1 else UnionStep(tuple(steps))

    def _choice(self) -> Step:
        """Read one of the things that may stand in brackets."""
        if self._cursor.took("*"):
            return WildcardStep()
        name = self._cursor.quoted()
        if name is not None:
            return FieldStep(name)
        self._cursor.skip_blanks()
        found = _SLICE_PATTERN.match(self._cursor.rest())
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
        return SliceStep(slice(first, last, step), is_bounded=self._is_bounded)

    def _filter(self) -> Step:
        if not self._cursor.took("("):
            raise self._cursor.wrong("expected ( after ?")
        left = self._operand()
        sign = next((sign for sign in OPERATORS if self._cursor.took(sign)), "")
        right = self._operand() if sign else None
        if not (self._cursor.took(")") and self._cursor.took("]")):
            raise self._cursor.wrong('expected )], as in [?(@.type=="Ready")]')
        return FilterStep(left, sign, right)

    def _operand(self) -> Operand:
        quoted = self._cursor.quoted()
        if quoted is not None:
            return ConstantOperand(quoted)
        number = _NUMBER_PATTERN.match(self._cursor.rest())
        if number is not None:
            self._cursor.at += number.end()
            return ConstantOperand(float(number.group()))
        for word, value in (("true", True), ("false", False)):
            if self._cursor.took(word):
                return ConstantOperand(value)
        return self._path()
