"""How many examples a property gets where one costs more than a few milliseconds."""

from hypothesis import settings

_NORMAL = 200
"""Of the profile `ci`, for which the numbers are chosen."""


def few(number: int) -> int:
    """Return so many for a normal run, and more where the profile has more: `--hypothesis-profile=nightly`."""
    return max(1, number * settings().max_examples // _NORMAL)
