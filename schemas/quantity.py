"""Quantities of bytes as people write them ("96Gi") and as tables show them. Pure."""

import re
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_PATTERN = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"

# Bounded: int() refuses thousands of digits, and a float of hundreds is infinite.
Quantity = Annotated[str, StringConstraints(pattern=_PATTERN, max_length=32)]


def parse(text: str) -> int:
    """Return the bytes that a quantity such as "96Gi" or "1.5G" says.

    Raises:
        ValueError: the text is no quantity.

    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?", text)
    if found is None:
        raise ValueError(f"{text!r} is not a quantity; write bytes as in 512Mi, 96Gi or 1.5G")
    number, unit = found.groups()
    return int(Decimal(number) * _UNITS[unit or ""])


def show(size_bytes: int) -> str:
    """Return the size with a binary unit and three digits at most: "19.2 GiB", "512 MiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _not_zero(text: str) -> str:
    if parse(text) <= 0:
        raise ValueError("must be more than 0; leave the field out if nothing is meant")
    return text


PositiveQuantity = Annotated[Quantity, AfterValidator(_not_zero)]
