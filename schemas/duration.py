"""Durations as users write them ("90s", "1h30m", "500ms"), as in Go and Kubernetes. Pure."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from schemas.meta import Examples

_PATTERN = r"^([0-9]{1,4}h)?([0-9]{1,5}m)?([0-9]{1,6}s)?([0-9]{1,6}ms)?$"
_PARTS = r"(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?(?:(\d{1,6})ms)?"


# Words that people write for units.
_WORDS = {
    "ms": ("ms", "msec", "millis", "millisecond", "milliseconds"),
    "s": ("s", "sec", "secs", "second", "seconds"),
    "m": ("m", "min", "mins", "minute", "minutes"),
    "h": ("h", "hr", "hrs", "hour", "hours"),
    "d": ("d", "day", "days"),
}
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_LEAST_TOO_LONG_S = 10_000 * 3600
_WORDED = re.compile(
    rf"([0-9]{{1,6}}(?:\.[0-9]{{1,3}})?)\s*({'|'.join(sorted((w for words in _WORDS.values() for w in words), key=len, reverse=True))})"
)


@lru_cache(maxsize=1024)  # ten thousand objects use the same few
def parse(text: str) -> float:
    """Return the seconds of a duration such as "90s", "1h30m" or "500ms".

    Raises:
        ValueError: the text is no duration.

    """
    found = re.fullmatch(_PARTS, text, re.ASCII)
    if found is None or not text:
        raise ValueError(
            f"{text!r} is not a duration; write hours, minutes, seconds and milliseconds "
            "as in 1h30m, 90s or 500ms"
        )
    hours, minutes, seconds, thousandths = (int(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds + thousandths / 1000


def render(seconds: float) -> str:
    """Return the seconds as a duration, to the millisecond: 5400.25 is "1h30m250ms"."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    parts = (
        *((whole // 3600, "h"), (whole // 60 % 60, "m"), (whole % 60, "s")),
        (thousandths, "ms"),
    )
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


def show(seconds: float) -> str:
    """Return the seconds for a message: to the millisecond below one second, else to the second."""
    return render(seconds if seconds < 1 else round(seconds))


def _checked(text: str) -> str:
    parse(text)
    return text


def _positive(text: str) -> str:
    if parse(text) == 0:
        raise ValueError("must be more than 0s")
    return text


def at_least(shortest: str, why: str) -> AfterValidator:
    """Return the check that a duration is not shorter than `shortest`."""

    def check(text: str) -> str:
        if parse(text) < parse(shortest):
            raise ValueError(f"must be at least {shortest}: {why}")
        return text

    return AfterValidator(check)


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit that a bare number probably has, for the hint of an error message."""

    is_positive: bool = False

    def example(self, found: object) -> str:
        """Return a value to write in place of the one that was found."""
        if isinstance(found, bool) or not isinstance(found, int | float):
            return "90s"
        return self.spell(found) or "90s"

    def translate(self, text: str) -> str | None:
        """Return the duration that a text such as `10min`, `0.5s` or `2 days` means; None if it means none."""
        parts = _WORDED.findall(text.lower())
        if not parts or "".join(f"{number}{word}" for number, word in parts) != re.sub(
            r"[\s,]", "", text.lower()
        ):
            return None
        seconds = 0.0
        for number, word in parts:
            unit = next(unit for unit, words in _WORDS.items() if word in words)
            seconds += float(number) * _SECONDS[unit]
        return self.spell(seconds)

    def spell(self, seconds: float) -> str | None:
        """Return the seconds as a duration, or None if the type has none for them."""
        is_valid = 0 <= seconds < _LEAST_TOO_LONG_S and (seconds >= 0.0005 or not self.is_positive)
        return render(seconds) if is_valid else None


Duration = Annotated[
    str,
    StringConstraints(max_length=20),
    AfterValidator(_checked),
    Unit(),
    Examples(("90s", "10m", "500ms")),
    # The pattern is for editors only: an error message made of it would not help.
    Field(json_schema_extra={"pattern": _PATTERN}),
]
PositiveDuration = Annotated[Duration, AfterValidator(_positive), Unit(is_positive=True)]
