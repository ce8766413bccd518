"""Objects of every kind, made by hypothesis from the types alone: a new field is covered by itself."""

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le, MinLen
from hypothesis import strategies as st
from pydantic import AfterValidator, StringConstraints

from schemas.meta import ApiModel

_BIGGEST = 2**63 - 1


@cache
def objects(model: type[ApiModel]) -> st.SearchStrategy[ApiModel]:
    """Return a strategy for whatever the model allows."""
    fields = {
        name: values(field.annotation, field.metadata) for name, field in model.model_fields.items()
    }
    return st.fixed_dictionaries(fields).map(lambda given: model(**given))


def values(annotation: Any, constraints: Sequence[object] = ()) -> st.SearchStrategy[Any]:
    """Return a strategy for a type."""
    arguments = get_args(annotation)
    match get_origin(annotation):
        case found if found is Annotated:
            return values(arguments[0], arguments[1:])
        case found if found is Literal:
            return st.sampled_from(arguments)
        case found if found in (Union, UnionType):
            return st.one_of(*(values(one) for one in arguments))
        case found if found is tuple:
            least = next((c.min_length for c in constraints if isinstance(c, MinLen)), 0)
            return st.lists(values(arguments[0]), min_size=least, max_size=3).map(tuple)
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
        int: _numbers(constraints),
    }
    return plain[kind]


def _numbers(constraints: Sequence[object]) -> st.SearchStrategy[int]:
    least = next((c.ge for c in constraints if isinstance(c, Ge)), -_BIGGEST)
    most = next((c.le for c in constraints if isinstance(c, Le)), _BIGGEST)
    assert isinstance(least, int)
    assert isinstance(most, int)
    return st.integers(least, most)


def _texts(constraints: Sequence[object]) -> st.SearchStrategy[str]:
    found = st.text(max_size=20)
    for one in constraints:
        if isinstance(one, StringConstraints):
            assert isinstance(one.pattern, str)
            longest = one.max_length or 64
            found = st.from_regex(one.pattern, fullmatch=True).map(lambda t: t.rstrip("\n"))
            found = found.filter(partial(_is_within, longest))
        if isinstance(one, AfterValidator):  # a path that does not step out
            found = found.filter(lambda text: ".." not in text)
    return found


def _is_within(longest: int, text: str) -> bool:
    return len(text) <= longest
