"""Quantities as users write them: bytes ("96Gi"), replicas as a number or a percentage (2, "25%"), requests at once. Pure.

The second form is Kubernetes' IntOrString.
"""

import re
from typing import Annotated, Final, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from schemas import sizes

_PATTERN = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"

# Bounded: int() refuses thousands of digits, and a float of hundreds is infinite.
Quantity = Annotated[str, StringConstraints(pattern=_PATTERN, max_length=32)]


parse, show = sizes.parse, sizes.show


def _not_zero(text: str) -> str:
    if parse(text) <= 0:
        raise ValueError("must be more than 0; to set nothing, leave the field out")
    return text


PositiveQuantity = Annotated[Quantity, AfterValidator(_not_zero)]


Percent = Annotated[str, StringConstraints(pattern=r"^(100|[1-9]?[0-9])%$")]


def _checked_amount(value: object) -> object:
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10_000
    is_part = isinstance(value, str) and re.fullmatch(r"(100|[1-9]?[0-9])%", value) is not None
    if not is_number and not is_part:
        raise ValueError(
            'is neither a number of replicas (0 to 10000) nor a percentage; write 1, or "25%"'
        )
    return value


Amount = Annotated[
    Annotated[int, Field(ge=0, le=10_000)] | Percent, BeforeValidator(_checked_amount)
]


_MOST_REQUESTS: Final = 1024
DEFAULT_CONCURRENCY: Final = 4
"""The requests of a replica with `concurrency: Auto` where its hardware does not say more."""


def _checked_concurrency(value: object) -> object:
    """Refuse what is neither Auto nor a number: one message in place of one for each form."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value != "Auto" and not (is_number and 1 <= cast("int", value) <= _MOST_REQUESTS):
        raise ValueError(f"must be Auto, or a number from 1 to {_MOST_REQUESTS}; got {value!r}")
    return value


Concurrency = Annotated[
    Literal["Auto"] | Annotated[int, Field(ge=1, le=_MOST_REQUESTS)],
    BeforeValidator(_checked_concurrency),
]


def requests_at_once(asked: Concurrency, reported: int = 0) -> int:
    """Return how many requests one replica works on at once; with Auto as its status says, or will by default (0)."""
    return asked if asked != "Auto" else reported or DEFAULT_CONCURRENCY


def resolve_amount(amount: int | str, whole: int, *, round_up: bool) -> int:
    """Return the number of replicas out of `whole`; a percentage is rounded up or down."""
    if isinstance(amount, int):
        return amount
    hundredths = int(amount.removesuffix("%")) * whole
    return -(-hundredths // 100) if round_up else hundredths // 100


def percent_fraction(percent: str) -> float:
    """Return "25%" as 0.25."""
    return int(percent.removesuffix("%")) / 100


def counted(number: int, one: str, several: str) -> str:
    """Return a number with its noun phrase."""
    return f"{number} {one if number == 1 else several}"
