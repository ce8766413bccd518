"""Bounds the regular expressions that must match the same text of an output: one `pattern` and one `format`. Pure.

A text must match several where parts of a schema hold together: the members of `allOf`, a reference or alternatives
beside other keywords, and a property beside `patternProperties`. llguidance then builds the product of the expressions.
One step of it takes time exponential in their number, and the library's fuel is not looked at within a step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, TypeAlias

from engine.errors import GrammarError

Json: TypeAlias = Any  # a normalized schema, or a part of it
Path: TypeAlias = tuple[str, ...]
"""A place in an output, relative to a part of a schema."""

# Steps of a path that stand for others: any name or index, and any number of steps.
_ANY: Final = "*"
_REST: Final = "**"
# Places and pairs of places that are looked at, in 0.1 s.
_MAX_WORK = 200_000
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})


class PatternError(GrammarError):
    """The patterns or formats of a schema cannot be enforced together."""


@dataclass(frozen=True, slots=True)
class Expressions:
    """The expressions that one text must match: patterns and formats, without repetitions."""

    patterns: frozenset[object] = frozenset()
    formats: frozenset[object] = frozenset()

    @property
    def is_bounded(self) -> bool:
        """True if llguidance's product of them is small."""
        return len(self.patterns) <= 1 and len(self.formats) <= 1

    def joined(self, other: "Expressions") -> "Expressions":
        """Return the expressions of a text that must match both."""
        return Expressions(self.patterns | other.patterns, self.formats | other.formats)


Places: TypeAlias = dict[Path, Expressions]


def check_patterns(schema: Json, targets: Mapping[str, Json]) -> None:
    """Refuse a schema in which a text must match two patterns or two formats; `targets` are those of its references.

    Raises:
        PatternError: there is one; names the place.

    """
    if any(_combines(part) for part in (schema, *targets.values())):
        _PatternSearch(targets).places(schema, "$")


def _combines(part: Json) -> bool:
    """Return whether several parts of a schema hold together anywhere in it."""
    if isinstance(part, list):
        return any(_combines(one) for one in part)
    if not isinstance(part, Mapping):
        return False
    found = part.keys() & _COMBINING
    if found and (len(part) > 1 or len(part.get("allOf", ())) > 1):
        return True
    if "patternProperties" in part:
        return True
    return any(_combines(value) for name, value in part.items() if name not in ("enum", "const"))


@dataclass(slots=True)
class _PatternSearch:
    targets: Mapping[str, Json]
    _known: dict[str, Places | None] = field(default_factory=dict)
    """Places of references; None while they are being searched."""
    _work: int = 0
    _fresh: Iterable[int] = field(default_factory=count)

    def places(self, schema: Json, where: str) -> Places:
        """Return the places below a part of a schema that have expressions."""
        if not isinstance(schema, Mapping):
            return {}
        found = self._own(schema, where)
        for at, one in enumerate(schema.get("allOf", ())):
            found = self._together(found, self.places(one, f"{where}.allOf[{at}]"), where)
        for name in ("anyOf", "oneOf"):
            options = [
                self.places(one, f"{where}.{name}[{at}]")
                for at, one in enumerate(schema.get(name, ()))
            ]
            found = self._together(found, self._either(options), where)
        if "$ref" in schema:
            found = self._together(found, self._reference(schema["$ref"]), where)
        return found

    def _own(self, schema: Mapping[str, Json], where: str) -> Places:
        texts = [
            frozenset[object]({schema[name]} if name in schema else ())
            for name in ("pattern", "format")
        ]
        places: Places = {(): Expressions(*texts)} if any(texts) else {}
        for at, one in enumerate(schema.get("prefixItems", ())):
            places |= self._below(f"[{at}]", self.places(one, f"{where}.prefixItems[{at}]"))
        places |= self._below(_ANY, self.places(schema.get("items"), f"{where}.items"))
        named: Places = {}
        for name, one in schema.get("properties", {}).items():
            named |= self._below(f".{name}", self.places(one, f"{where}.properties.{name[:100]}"))
        by_pattern = self._either(
            [
                self.places(one, f"{where}.patternProperties.{name[:100]}")
                for name, one in schema.get("patternProperties", {}).items()
            ]
        )
        others = self.places(schema.get("additionalProperties"), f"{where}.additionalProperties")
        # A name of `properties` may match `patternProperties`, too; others never apply beside either.
        named = self._together(named, self._below(_ANY, by_pattern), where)
        return self._either([places | named, self._below(_ANY, others)])

    def _reference(self, ref: str) -> Places:
        if ref in self._known:
            known = self._known[ref]
            # A recursive part may have any of its expressions at any depth.
            return {(_REST,): self._opaque(1, 1)} if known is None else known
        self._known[ref] = None
        places = self.places(self.targets.get(ref), ref[:100])
        self._known[ref] = places
        return places

    def _opaque(self, patterns: int, formats: int) -> Expressions:
        """Return expressions that differ from all others."""
        numbers = iter(self._fresh)
        return Expressions(
            frozenset(next(numbers) for _ in range(patterns)),
            frozenset(next(numbers) for _ in range(formats)),
        )

    def _either(self, options: Iterable[Places]) -> Places:
        """Return the places of parts of which one holds."""
        places: Places = {}
        for option in options:
            for path, expressions in option.items():
                other = places.get(path, expressions)
                places[path] = (
                    expressions
                    if expressions == other
                    else self._opaque(
                        max(len(expressions.patterns), len(other.patterns)),
                        max(len(expressions.formats), len(other.formats)),
                    )
                )
        return places

    def _below(self, step: str, places: Places) -> Places:
        self._spend(len(places))
        return {(step, *path): found for path, found in places.items()}

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > _MAX_WORK:
            raise PatternError(
                "$: the parts of this schema that hold together have too many patterns to compare; "
                "use fewer members of 'allOf', or fewer references beside other keywords."
            )

    def _together(self, first: Places, second: Places, where: str) -> Places:
        """Return the places of two parts that both hold.

        Raises:
            GrammarError: a place has too many expressions.

        """
        places = {**first, **second}
        for path, expressions in first.items():
            self._spend(len(second))
            for other_path, other in second.items():
                if not _can_meet(path, other_path):
                    continue
                both = expressions.joined(other)
                if not both.is_bounded:
                    raise _too_many(where, path if _REST not in path else other_path, both)
                places[max(path, other_path, key=_precision)] = both
        return places


def _can_meet(first: Path, second: Path) -> bool:
    for one, other in zip(first, second, strict=False):
        if _REST in (one, other):
            return True
        if one != other and _ANY not in (one, other):
            return False
    if len(first) == len(second):
        return True
    longer = max(first, second, key=len)
    return longer[min(len(first), len(second))] == _REST


def _precision(path: Path) -> tuple[int, int]:
    return len(path), -sum(step in (_ANY, _REST) for step in path)


def _too_many(where: str, path: Path, found: Expressions) -> PatternError:
    name = "pattern" if len(found.patterns) > 1 else "format"
    place = "".join(step if step.startswith((".", "[")) else f".{step}" for step in path)
    target = f" at {place[:200]}" if place else ""
    return PatternError(
        f"{where[:200]}: several values of '{name}' hold together{target}. A text can have at most one "
        "'pattern' and one 'format'; join them into one pattern."
    )
