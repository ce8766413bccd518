"""Hypothesis strategies for objects of every kind, derived from the types, so that new fields are covered."""

import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from hypothesis import strategies as st
from pydantic import AfterValidator, AwareDatetime, StringConstraints, ValidationError

from schemas.meta import ApiModel, Examples
from tests.support.store_certificates import Authority

_BIGGEST = 2**63 - 1


@cache
def objects(model: type[ApiModel]) -> st.SearchStrategy[ApiModel]:
    """Return a strategy for valid values of the model."""
    fields = {
        name: _FIELDS[key]
        if (key := (model.__name__, name)) in _FIELDS
        else values(field.annotation, field.metadata)
        for name, field in model.model_fields.items()
    }
    # Fields that are each valid may be invalid together.
    made = st.fixed_dictionaries(fields).map(partial(_made, model))
    return made.filter(lambda found: found is not None).map(lambda found: cast("ApiModel", found))


def _made(model: type[ApiModel], given: dict[str, Any]) -> ApiModel | None:
    """Return the object; if its fields are invalid together, leave out optional ones."""
    given = _MATCHES.get(model.__name__, dict)(given)
    optional = [name for name, field in model.model_fields.items() if not field.is_required()]
    for left_out in (None, *optional):
        try:
            return model(**{name: value for name, value in given.items() if name != left_out})
        except ValidationError as error:
            if any(one["type"] != "value_error" or one["loc"] for one in error.errors()):
                raise  # the strategy must not produce a value that the type alone forbids
    return None


def _one_backend(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Backend, which names either a deployment or an external endpoint."""
    deployment, external = given["deployment"], given["external"]
    if external is not None:
        return {**given, "deployment": None}
    return {**given, "deployment": deployment or "m"}


def _matching_route(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a ModelRouteSpec whose external endpoints are declared once and used."""
    external = tuple({one.name: one for one in given["external"]}.values())
    names = [one.name for one in external]

    def matched(backends: tuple[Any, ...]) -> tuple[Any, ...]:
        some = {"deployment": None, "external": names[0]} if names else {}
        other = some or {"deployment": "m", "external": None}
        return tuple(
            backend if backend.external is None else backend.model_copy(update=other)
            for backend in backends
        )

    rules = tuple(
        one.model_copy(update={"backends": matched(one.backends)}) for one in given["rules"]
    )
    return {
        **given,
        "external": external,
        "backends": matched(given["backends"]),
        "rules": rules,
        "fallbacks": tuple(dict.fromkeys((*given["fallbacks"], *names))),
    }


@cache
def _certificate() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return Authority(Path(folder), "any").certificate.read_text()


# Fields that must match each other, by the name of their model.
_MATCHES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "Backend": _one_backend,
    "ModelRouteSpec": _matching_route,
}
# Fields whose type does not say what is valid.
_FIELDS: dict[tuple[str, str], st.SearchStrategy[Any]] = {
    ("ExternalEndpoint", "authorities"): st.one_of(st.none(), st.builds(_certificate)),
}


def values(annotation: Any, constraints: Sequence[object] = ()) -> st.SearchStrategy[Any]:
    """Return a strategy for a type."""
    arguments = get_args(annotation)
    constraints = [
        one for constraint in constraints for one in getattr(constraint, "metadata", [constraint])
    ]
    match get_origin(annotation):
        case found if found is Annotated:
            return values(arguments[0], arguments[1:])
        case found if found is Literal:
            return st.sampled_from(arguments)
        case found if found in (Union, UnionType):
            return st.one_of(*(values(argument) for argument in arguments))
        case found if found is tuple:
            least = next((c.min_length for c in constraints if isinstance(c, MinLen)), 0)
            lists = st.lists(values(arguments[0]), min_size=least, max_size=3)
            return lists.map(tuple).filter(partial(_passes, constraints))
        case found if found is dict:
            return st.dictionaries(*map(values, arguments), max_size=3)
        case _:
            return _plain(annotation, constraints)


def _plain(kind: type, constraints: Sequence[object]) -> st.SearchStrategy[Any]:
    if issubclass(kind, ApiModel):
        return objects(kind)
    if issubclass(kind, StrEnum):
        return st.sampled_from(list(kind))
    if issubclass(kind, str):
        return _texts(constraints)
    plain: dict[type, st.SearchStrategy[Any]] = {
        NoneType: st.none(),
        bool: st.booleans(),
        datetime: st.datetimes(timezones=st.just(UTC)),
        AwareDatetime: st.datetimes(timezones=st.just(UTC)),
        int: _numbers(constraints),
        float: _floats(constraints),
    }
    return plain[kind]


def _numbers(constraints: Sequence[object]) -> st.SearchStrategy[int]:
    least = next((c.ge for c in constraints if isinstance(c, Ge)), -_BIGGEST)
    most = next((c.le for c in constraints if isinstance(c, Le)), _BIGGEST)
    assert isinstance(least, int)
    assert isinstance(most, int)
    return st.integers(least, most)


def _floats(constraints: Sequence[object]) -> st.SearchStrategy[float]:
    above = next((c.gt for c in constraints if isinstance(c, Gt)), None)
    least = next((c.ge for c in constraints if isinstance(c, Ge)), above)
    below = next((c.lt for c in constraints if isinstance(c, Lt)), None)
    most = next((c.le for c in constraints if isinstance(c, Le)), below)
    return st.floats(
        cast("float | None", least),
        cast("float | None", most),
        exclude_min=above is not None,
        exclude_max=below is not None,
        allow_nan=False,
        allow_infinity=False,
    )


def _texts(constraints: Sequence[object]) -> st.SearchStrategy[str]:
    examples = [constraint for constraint in constraints if isinstance(constraint, Examples)]
    if examples:
        return st.sampled_from(examples[-1].values)  # the narrowest type's
    strategy = st.text(max_size=20)
    for constraint in constraints:
        if isinstance(constraint, StringConstraints):
            longest = constraint.max_length or 64
            if constraint.pattern is None:
                strategy = st.text(max_size=min(longest, 20))
                continue
            assert isinstance(constraint.pattern, str)
            strategy = st.from_regex(constraint.pattern, fullmatch=True).map(
                lambda t: t.rstrip("\n")
            )
            strategy = strategy.filter(partial(_is_within, longest))
        if isinstance(constraint, MinLen):
            strategy = strategy.filter(bool)
    return strategy.filter(partial(_passes, constraints))


def _passes(constraints: Sequence[object], value: Any) -> bool:
    """Return true if the type's own validators accept the value."""
    try:
        for constraint in constraints:
            if isinstance(constraint, AfterValidator):
                check: Callable[[Any], Any] = constraint.func  # type: ignore[assignment]  # none takes an info
                check(value)
    except ValueError:
        return False
    return True


def _is_within(longest: int, text: str) -> bool:
    return len(text) <= longest
