r"""kubectl's JSONPath: parses templates such as `{range .items[*]}{.metadata.name}{"\n"}{end}` and applies them. Pure.

The language is that of k8s.io/client-go/util/jsonpath: text between braces, quoted text, `range` and `end`, fields,
`[*]`, `[n]`, slices, unions, filters, `..`, `$` and `@`. A missing field is empty, as in kubectl get. In a template, an
index beyond the end of a list is an error; in a single path (`parse_path`) it finds nothing.
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
    """A text and the position up to which it has been read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def read_quoted(self) -> str | None:
        self.skip_blanks()
        found = _QUOTED.match(self.remaining())
        if found is None:
            return None
        self.at += found.end()
        text = found[1] if found[1] is not None else found[2]
        return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), text)

    def remaining(self) -> str:
        return self.text[self.at :]

    def skip_blanks(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def accept(self, word: str) -> bool:
        self.skip_blanks()
        return self.accept_here(word)

    def accept_here(self, word: str) -> bool:
        is_there = self.text.startswith(word, self.at)
        self.at += len(word) if is_there else 0
        return is_there

    def error(self, problem: str) -> FleetctlError:
        return FleetctlError(
            f"jsonpath {self.text}: {problem} (at character {self.at + 1}). Use kubectl's syntax, such as "
            '{.metadata.name} or {range .items[*]}{.metadata.name}{"\\n"}{end}'
        )


@dataclass(frozen=True, slots=True)
class FieldStep:
    """`.name` or `['name']`."""

    name: str

    def apply(self, value: Any, _: Any) -> Iterator[Any]:
        if isinstance(value, Mapping) and self.name in value:
            yield value[self.name]


@dataclass(frozen=True, slots=True)
class WildcardStep:
    """`.*` or `[*]`."""

    def apply(self, value: Any, _: Any) -> Iterator[Any]:
        yield from _children(value)


@dataclass(frozen=True, slots=True)
class RecursiveStep:
    """`..`: the value and all values below it."""

    def apply(self, value: Any, root: Any) -> Iterator[Any]:
        yield value
        for part in _children(value):
            yield from self.apply(part, root)


@dataclass(frozen=True, slots=True)
class SliceStep:
    """`[2]`, `[-1]`, `[1:3]`, `[::2]`."""

    cut: slice
    is_bounded: bool = True
    """True if an index beyond the end is an error; otherwise it finds nothing."""

    def apply(self, value: Any, _: Any) -> Iterator[Any]:
        """Yield the items of a list.

        Raises:
            FleetctlError: an index is beyond the end of the list.

        """
        if isinstance(value, list):
            if self.is_bounded:
                self._refuse_beyond(len(value))
            yield from value[self.cut]

    def _refuse_beyond(self, length: int) -> None:
        """Refuse indexes as client-go's evalArray does: an empty slice is never an error."""
        first, last = (
            (n if n is None or n >= 0 else n + length) for n in (self.cut.start, self.cut.stop)
        )
        first, last = first or 0, length if last is None else last
        if first == last:
            return
        beyond = first if not 0 <= first < length else last - 1
        if not 0 <= beyond < length:
            raise FleetctlError(f"array index out of bounds: index {beyond}, length {length}")


@dataclass(frozen=True, slots=True)
class UnionStep:
    """`[0,2]`, `['a','b']`: the values of each step, one after the other."""

    steps: tuple["Step", ...]

    def apply(self, value: Any, root: Any) -> Iterator[Any]:
        for step in self.steps:
            yield from step.apply(value, root)


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
    """`[?(@.name == "x")]`, `[?(@.name)]`: the children for which the condition is true."""

    left: "Operand"
    operator: str = ""
    right: "Operand | None" = None

    def apply(self, value: Any, root: Any) -> Iterator[Any]:
        for part in _children(value):
            if self._holds(part, root):
                yield part

    def _holds(self, part: Any, root: Any) -> bool:
        left = self.left.apply(part, root)
        if self.right is None:
            return bool(left)
        right = self.right.apply(part, root)
        if not left or not right:
            return False
        try:
            return bool(_OPERATORS[self.operator](left[0], right[0]))
        except TypeError:  # as in kubectl: values that cannot be compared do not match
            return False


@dataclass(frozen=True, slots=True)
class FieldPath:
    """A path that starts at the current value, or at the root."""

    steps: tuple["Step", ...]
    is_from_root: bool = False

    def find(self, tree: Any) -> list[Any]:
        """Return all values that the path finds in a tree."""
        return self.apply(tree, tree)

    def apply(self, value: Any, root: Any) -> list[Any]:
        values = [root if self.is_from_root else value]
        for step in self.steps:
            values = [found for one in values for found in step.apply(one, root)]
        return values


@dataclass(frozen=True, slots=True)
class ConstantOperand:
    """A text, number or boolean to compare with."""

    value: Any

    def apply(self, _: Any, __: Any) -> list[Any]:
        return [self.value]


Step: TypeAlias = FieldStep | WildcardStep | RecursiveStep | SliceStep | UnionStep | FilterStep
Operand: TypeAlias = FieldPath | ConstantOperand


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
    """`{range PATH}...{end}`: the parts between, once for each value of the path."""

    path: FieldPath
    parts: tuple["TemplatePart", ...]


TemplatePart: TypeAlias = str | FieldPath | RangeBlock


@dataclass(frozen=True, slots=True)
class PathTemplate:
    """Text with paths in it."""

    parts: tuple[TemplatePart, ...]

    def text(self, tree: Any) -> str:
        """Return the text for a tree; several values of one path are separated by spaces.

        Raises:
            FleetctlError: an index is beyond the end of a list.

        """
        return _render_parts(self.parts, tree, tree)


def parse(text: str) -> PathTemplate:
    """Parse a template.

    Raises:
        FleetctlError: the template is invalid; the message has the position.

    """
    return _Parser(text).template()


def parse_path(text: str) -> FieldPath:
    """Parse one path, written as `{.a.b}`, `.a.b` or `a.b`, for columns, sorting and waiting.

    An index beyond the end of a list finds nothing, because objects differ.

    Raises:
        FleetctlError: the path is invalid; the message has the position.

    """
    bare = text.strip()
    bare = bare[1:-1].strip() if bare.startswith("{") and bare.endswith("}") else bare
    path = bare if bare.startswith((".", "[", "$", "@")) else f".{bare}"
    parser = _Parser(path, is_bounded=False)
    return parser.whole_path()


def format_value(value: Any) -> str:
    """Return a value as text: strings as they are, everything else as JSON."""
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
            found += [_render_parts(part.parts, one, root) for one in part.path.apply(tree, root)]
        else:
            found.append(" ".join(map(format_value, part.apply(tree, root))))
    return "".join(found)


class _Parser:
    """Parses a template or a path."""

    def __init__(self, text: str, *, is_bounded: bool = True) -> None:
        self._cursor = TextCursor(text)
        self._is_bounded = is_bounded

    def template(self) -> PathTemplate:
        parts = self._parts(depth=0)
        return PathTemplate(parts)

    def whole_path(self) -> FieldPath:
        path = self._path()
        if self._cursor.at < len(self._cursor.text):
            raise self._cursor.error("unexpected text after the path")
        return path

    def _parts(self, *, depth: int) -> tuple[TemplatePart, ...]:
        """Parse until the end of the text, or until the `{end}` of a range."""
        if depth > _MAX_DEPTH:
            raise self._cursor.error(f"more than {_MAX_DEPTH} nested ranges")
        template_parts: list[TemplatePart] = []
        while self._cursor.at < len(self._cursor.text):
            plain, brace, _ = self._cursor.remaining().partition("{")
            template_parts += [plain] if plain else []
            self._cursor.at += len(plain) + len(brace)
            while brace and not self._cursor.accept("}"):
                if self._cursor.accept("end"):
                    self._expect_brace("end")
                    if not depth:
                        raise self._cursor.error("{end} without a range")
                    return tuple(template_parts)
                if not self._cursor.remaining():
                    raise self._cursor.error("expected }")
                template_parts.append(self._part(depth))
                if isinstance(template_parts[-1], RangeBlock):
                    break  # its {end} closed the braces
        if depth:
            raise self._cursor.error("a range has no {end}")
        return tuple(template_parts)

    def _part(self, depth: int) -> TemplatePart:
        """Parse one element within braces."""
        if re.match(r"range\b", self._cursor.remaining()):
            self._cursor.at += len("range")
            path = self._path()
            self._expect_brace("range PATH")
            return RangeBlock(path, self._parts(depth=depth + 1))
        quoted = self._cursor.read_quoted()
        return self._path() if quoted is None else quoted

    def _expect_brace(self, what: str) -> None:
        if not self._cursor.accept("}"):
            raise self._cursor.error(f"expected }} after {what}")

    def _path(self) -> FieldPath:
        self._cursor.skip_blanks()
        is_from_root = self._cursor.accept("$")
        is_here = is_from_root or self._cursor.accept("@")
        start, steps = self._cursor.at, []
        while self._cursor.remaining()[:1] in (".", "["):
            steps += self._steps()
        if self._cursor.at == start and not is_here:
            name = _NAME_PATTERN.match(self._cursor.remaining())
            if name is None:
                raise self._cursor.error("expected a path such as .metadata.name")
            raise self._cursor.error(f"write .{name.group()} for a field, or quote a text")
        return FieldPath(tuple(steps), is_from_root=is_from_root)

    def _steps(self) -> list[Step]:
        """Parse `.name`, `.*`, `..` or `[...]`."""
        if self._cursor.accept_here("["):
            return [self._bracket()]
        if self._cursor.accept_here(".."):
            named = self._cursor.remaining()[:1] not in ("[", "")
            return [RecursiveStep(), self._named()] if named else [RecursiveStep()]
        self._cursor.accept_here(".")
        if self._cursor.remaining()[:1] in ("[", "", "}", " "):  # `.[0]`; `{.}` is the whole value
            return []
        return [self._named()]

    def _named(self) -> Step:
        if self._cursor.accept_here("*"):
            return WildcardStep()
        found = _NAME_PATTERN.match(self._cursor.remaining())
        if found is None:
            raise self._cursor.error("expected the name of a field")
        self._cursor.at += found.end()
        return FieldStep(re.sub(r"\\(.)", r"\1", found.group()))

    def _bracket(self) -> Step:
        if self._cursor.accept("?"):
            if not self._cursor.accept("("):
                raise self._cursor.error("expected ( after ?")
            left = self._operand()
            sign = next((sign for sign in OPERATORS if self._cursor.accept(sign)), "")
            right = self._operand() if sign else None
            if not (self._cursor.accept(")") and self._cursor.accept("]")):
                raise self._cursor.error('expected )], as in [?(@.type=="Ready")]')
            return FilterStep(left, sign, right)
        steps = [self._choice()]
        while self._cursor.accept(","):
            steps.append(self._choice())
        if not self._cursor.accept("]"):
            raise self._cursor.error("expected ]")
        return steps[0] if len(steps) == 1 else UnionStep(tuple(steps))

    def _choice(self) -> Step:
        """Parse one element within brackets."""
        if self._cursor.accept("*"):
            return WildcardStep()
        name = self._cursor.read_quoted()
        if name is not None:
            return FieldStep(name)
        self._cursor.skip_blanks()
        found = _SLICE_PATTERN.match(self._cursor.remaining())
        if found is None or not found.group():
            raise self._cursor.error(
                "expected a number, a slice such as 1:3, *, a quoted name or ?(...)"
            )
        self._cursor.at += found.end()
        first, last, step = (None if n is None else int(n) for n in found.groups())
        if step is not None and step <= 0:
            raise self._cursor.error("the step of a slice must be at least 1")
        if ":" not in found.group():
            last = None if first == -1 else (first or 0) + 1
        return SliceStep(slice(first, last, step), is_bounded=self._is_bounded)

    def _operand(self) -> Operand:
        quoted = self._cursor.read_quoted()
        if quoted is not None:
            return ConstantOperand(quoted)
        number = _NUMBER_PATTERN.match(self._cursor.remaining())
        if number is not None:
            self._cursor.at += number.end()
            return ConstantOperand(float(number.group()))
        for word, value in (("true", True), ("false", False)):
            if self._cursor.accept(word):
                return ConstantOperand(value)
        return self._path()
