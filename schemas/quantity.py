"""Quantities of bytes as people write them ("96Gi") and as tables show them. Pure."""

from typing import Annotated

from pydantic import AfterValidator, StringConstraints

from schemas import sizes

_PATTERN = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"

# Bounded: int() refuses thousands of digits, and a float of hundreds is infinite.
Quantity = Annotated[str, StringConstraints(pattern=_PATTERN, max_length=32)]


parse, show = sizes.parse, sizes.show


def _not_zero(text: str) -> str:
    if parse(text) <= 0:
        raise ValueError("must be more than 0; leave the field out if nothing is meant")
    return text


PositiveQuantity = Annotated[Quantity, AfterValidator(_not_zero)]
