"""What is said of a name that nobody has. Pure."""

import difflib
from collections.abc import Iterable

from schemas.kinds import Kind


def not_found(kind: Kind, name: str, known: Iterable[str]) -> str:
    """Return the refusal for a name that nobody has, with the nearest."""
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f'{kind.plural} "{name}" not found{hint}'
