"""The steps of a JSONPath, and what each finds in a tree. Pure; parses nothing."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fleetctl.errors import FleetctlError


@dataclass(frozen=True, slots=True)
class Field:
    """`.name` or `['name']`."""

    name: str

    def found(self, value: Any, _: Any) -> Iterator[Any]:
        if isinstance(value, Mapping) and self.name in value:
            yield value[self.name]


@dataclass(frozen=True, slots=True)
class Every:
    """`.*` or `[*]`."""

    def found(self, value: Any, _: Any) -> Iterator[Any]:
        yield from _parts(value)


@dataclass(frozen=True, slots=True)
class Deep:
    """`..`: the value, and all below it."""

    def found(self, value: Any, root: Any) -> Iterator[Any]:
        yield value
        for part in _parts(value):
            yield from self.found(part, root)


@dataclass(frozen=True, slots=True)
class Slice:
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
        first, last = (_from_start(n, length) for n in (self.cut.start, self.cut.stop))
        first, last = first or 0, length if last is None else last
        if first == last:
            return
        beyond = first if not 0 <= first < length else last - 1
        if not 0 <= beyond < length:
            raise FleetctlError(f"array index out of bounds: index {beyond}, length {length}")


@dataclass(frozen=True, slots=True)
class Union:
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
class Filter:
    """`[?(@.name == "x")]`, `[?(@.name)]`: the parts for which it is true."""

    left: "Operand"
    operator: str = ""
    right: "Operand | None" = None

    def found(self, value: Any, root: Any) -> Iterator[Any]:
        for part in _parts(value):
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
class Path:
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
class Constant:
    """A text, number or truth value to compare with."""

    value: Any

    def found(self, _: Any, __: Any) -> list[Any]:
        return [self.value]


Step: TypeAlias = Field | Every | Deep | Slice | Union | Filter
Operand: TypeAlias = Path | Constant


def _from_start(place: int | None, length: int) -> int | None:
    return place if place is None or place >= 0 else place + length


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else ()
