"""Which version of mlx-fleet this is: what pip installed, spelled nowhere else; and which versions get along."""

import re
from functools import cache
from importlib.metadata import version as of_distribution
from typing import Final

# One minor apart is what a fleet looks like while it is upgraded.
_MAX_MINOR_SKEW: Final = 1


@cache
def version() -> str:
    """Return the version, such as 0.1.0."""
    return of_distribution("mlx-fleet")


def parse_release(text: str) -> tuple[int, int] | None:
    """Return major and minor version; None for what is no version of ours."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})", text)
    return (int(found[1]), int(found[2])) if found else None


def is_compatible(one: str, other: str) -> bool:
    """Return whether two parts of a fleet may be of these versions; a checkout gets along with everybody."""
    theirs, ours = parse_release(one), parse_release(other)
    if theirs is None or ours is None:
        return True
    return theirs[0] == ours[0] and abs(theirs[1] - ours[1]) <= _MAX_MINOR_SKEW
