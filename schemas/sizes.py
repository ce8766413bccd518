"""Bytes as users write and read them. Pure, and without pydantic, so that `fleetctl get` starts quickly."""

import re

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
_QUANTITY = re.compile(r"([0-9]+)(?:\.([0-9]+))?(Ki|Mi|Gi|Ti|k|M|G|T)?")


def parse(text: str) -> int:
    """Return the bytes of a quantity such as "96Gi" or "1.5G".

    Raises:
        ValueError: the text is no quantity.

    """
    found = _QUANTITY.fullmatch(text)
    if found is None:
        meant = meanings(text)
        example = " or ".join(meant) or "bytes as in 512Mi, 96Gi or 1.5G"
        sold = (
            f" (a Mac sold with {text} has {meant[-1]})"
            if len(meant) > 1 and "g" in text.lower()
            else ""
        )
        raise ValueError(f"{text!r} is not a quantity; write {example}{sold}")
    whole, part, unit = found.groups(default="")
    return int(whole + part) * _UNITS[unit] // int(f"1{'0' * len(part)}")


def meanings(text: str) -> list[str]:
    """Return the quantities that a text such as `24GB` or `24 gib` may mean."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([kmgt])(i?)b?", text.lower(), re.ASCII)
    if found is None:
        return []
    number, unit, is_binary = found.groups()
    binary = f"{number}{unit.upper()}i"
    return [binary] if is_binary else [f"{number}{'k' if unit == 'k' else unit.upper()}", binary]


def show(size_bytes: int) -> str:
    """Return the size with a binary unit and at most three digits: "19.2 GiB", "512 MiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
