"""The version of mlx-fleet as installed by pip, and the rule which versions are compatible."""

import re
from functools import cache, lru_cache
from importlib.metadata import version as of_distribution
from pathlib import Path
from typing import Final

# A fleet that is being upgraded has two neighbouring minor versions.
_MAX_MINOR_SKEW: Final = 1


@cache
def version() -> str:
    """Return the version, such as 0.1.0."""
    return of_distribution("mlx-fleet")


@cache
def commit() -> str:
    """Return the Git commit that `make dist` built this from; empty in a checkout."""
    try:
        return (Path(__file__).parent / "commit.txt").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""


def version_with_commit() -> str:
    """Return the version for people, such as 0.1.0 (3d5cbb8aa5f0)."""
    return f"{version()} ({commit()})" if commit() else version()


@lru_cache(maxsize=256)
def parse_release(text: str) -> tuple[int, int] | None:
    """Return major and minor version; None if the text is not one of our versions."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})", text)
    return (int(found[1]), int(found[2])) if found else None


def is_compatible(one: str, other: str) -> bool:
    """Return whether two parts of a fleet may have these versions; an unknown version is compatible with every other."""
    theirs, ours = parse_release(one), parse_release(other)
    if theirs is None or ours is None:
        return True
    return theirs[0] == ours[0] and abs(theirs[1] - ours[1]) <= _MAX_MINOR_SKEW
