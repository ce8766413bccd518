"""Durations as users write them ("90s", "1h30m"), as in Go and Kubernetes. Pure."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from schemas.meta import Examples

_PATTERN = r"^([0-9]{1,4}h)?([0-9]{1,5}m)?([0-9]{1,6}s)?$"
_FINE_PATTERN = _PATTERN.removesuffix("$") + r"([0-9]{1,6}ms)?$"
_PARTS = r"(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?"


# Words that people write for units.
_WORDS = {
    "ms": ("ms", "msec", "millis", "millisecond", "milliseconds"),
    "s": ("s", "sec", "secs", "second", "seconds"),
    "m": ("m", "min", "mins", "minute", "minutes"),
    "h": ("h", "hr", "hrs", "hour", "hours"),
    "d": ("d", "day", "days"),
}
_WORDED = re.compile(
    rf"([0-9]{{1,6}})\s*({'|'.join(sorted((w for words in _WORDS.values() for w in words), key=len, reverse=True))})"
)


@lru_cache(maxsize=1024)  # ten thousand objects use the same few
def parse(text: str) -> int:
    """Return the seconds of a duration such as "90s", "10m" or "1h30m".

    Raises:
        ValueError: the text is no duration.

    """
    found = re.fullmatch(_PARTS, text, re.ASCII)
    if found is None or not text:
        raise ValueError(
            f"{text!r} is not a duration; write hours, minutes and seconds as in 1h30m or 90s"
        )
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds


@lru_cache(maxsize=1024)
def parse_fine(text: str) -> float:
    """Return the seconds of a duration that may have milliseconds: 0.05 for "50ms".

    Raises:
        ValueError: the text is no duration.

    """
    found = re.fullmatch(rf"{_PARTS}(?:(\d{{1,6}})ms)?", text, re.ASCII)
    if found is None or not text:
        raise ValueError(
            f"{text!r} is not a duration; write hours, minutes, seconds and milliseconds "
            "as in 1h30m, 90s or 500ms"
        )
    hours, minutes, seconds, thousandths = (int(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds + thousandths / 1000


def show(seconds: float) -> str:
    """Return the seconds as a duration: 5400 is "1h30m"."""
    whole = round(seconds)
    parts = ((whole // 3600, "h"), (whole // 60 % 60, "m"), (whole % 60, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


def _checked(text: str) -> str:
    parse(text)
    return text


def _checked_fine(text: str) -> str:
    parse_fine(text)
    return text


def _positive(text: str) -> str:
    if parse_fine(text) == 0:
        raise ValueError("must be more than 0s")
    return text


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit that a bare number probably has, for the hint of an error message."""

    is_fine: bool
    is_positive: bool = False

    def example(self, found: object) -> str:
        """Return a value to write in place of the one that was found."""
        usual = "500ms" if self.is_fine else "90s"
        if isinstance(found, bool) or not isinstance(found, int | float):
            return usual
        return self.spell(found) or usual

    def translate(self, text: str) -> str | None:
        """Return the duration that a text such as `10min` or `2 days` means; None if it means none."""
        parts = _WORDED.findall(text.lower())
        if not parts or "".join(f"{number}{word}" for number, word in parts) != re.sub(
            r"[\s,]", "", text.lower()
        ):
            return None
        totals = dict.fromkeys(("h", "m", "s", "ms"), 0)
        for number, word in parts:
            unit = next(unit for unit, words in _WORDS.items() if word in words)
            totals["h" if unit == "d" else unit] += int(number) * (24 if unit == "d" else 1)
        found = "".join(f"{number}{unit}" for unit, number in totals.items() if number)
        try:
            seconds = parse_fine(found) if self.is_fine else parse(found)
        except ValueError:
            return None
        return None if self.is_positive and not seconds else found

    def spell(self, seconds: float) -> str | None:
        """Return the seconds as a duration, or None if the type has none for them."""
        if seconds == 0 and self.is_positive:
            return None
        if 0 <= seconds < 1_000_000 and seconds == int(seconds):
            return f"{int(seconds)}s"
        thousandths = round(seconds * 1000) if 0 < seconds < 1000 else 0
        return f"{thousandths}ms" if self.is_fine and thousandths else None


# The pattern is for editors only: an error message made of it would not help.
_EDITORS = Field(json_schema_extra={"pattern": _PATTERN})
_FINE_EDITORS = Field(json_schema_extra={"pattern": _FINE_PATTERN})
_SHORT = StringConstraints(max_length=20)
_SOME = Examples(("90s", "10m", "1h30m"))
_SOME_FINE = Examples(("90s", "10m", "500ms"))
_WHOLE = Unit(is_fine=False)
_FINE = Unit(is_fine=True)
Duration = Annotated[str, _SHORT, AfterValidator(_checked), _WHOLE, _SOME, _EDITORS]
PositiveDuration = Annotated[
    Duration, AfterValidator(_positive), Unit(is_fine=False, is_positive=True)
]
FineDuration = Annotated[
    str, _SHORT, AfterValidator(_checked_fine), _FINE, _SOME_FINE, _FINE_EDITORS
]
"""A duration that may be shorter than a second; `parse_fine` reads it."""
PositiveFineDuration = Annotated[
    FineDuration, AfterValidator(_positive), Unit(is_fine=True, is_positive=True)
]
