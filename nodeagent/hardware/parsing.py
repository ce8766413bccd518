"""What all the readers share: text to pairs, text to numbers. Pure; never raises, "not there" is None."""

import re


def pairs(text: str, *, separator: str = ":") -> dict[str, str]:
    """Split lines of "key<separator> value"; of a repeated key the first value counts.

    /proc/cpuinfo repeats its keys once per core, sysctl and sw_vers never do.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, separated, value = line.partition(separator)
        if separated:
            found.setdefault(key.strip().strip('"'), value.strip())
    return found


def positive(text: str | None) -> int | None:
    """Read the whole number a text starts with. Zero counts as "not known": no quantity here can be 0."""
    match = re.match(r"\s*(\d+)", text or "", re.ASCII)
    return (int(match[1]) or None) if match else None
