"""Values that tests expect to be there."""

from typing import TypeVar

_T = TypeVar("_T")


def present(value: _T | None) -> _T:
    """Return the value, which must not be None."""
    assert value is not None
    return value
