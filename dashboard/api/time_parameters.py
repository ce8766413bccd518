"""Times in queries: `now`, `10m` (ago), or ISO 8601."""

from datetime import UTC, datetime
from typing import Final

from schemas import duration as durations
from schemas.wire.errors import invalid

_LONGEST_S: Final = 31 * 24 * 3600


def parse_time(text: str, name: str, now_s: float) -> float:
    """Return a time in seconds since 1970: `now`, `10m` (ago), or ISO 8601. Raises RefusedError."""
    if text == "now":
        return now_s
    try:
        return now_s - durations.parse(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        message = f"'{text}' is no time: write `now`, `10m` (ago), or 2026-01-31T12:00:00Z."
        raise invalid(message, name) from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def parse_range(from_: str, to: str, now_s: float) -> tuple[float, float]:
    """Return the begin and the end of a range of time. Raises RefusedError."""
    begin_s, end_s = parse_time(from_, "from", now_s), parse_time(to, "to", now_s)
    if not 0 < end_s - begin_s <= _LONGEST_S:
        raise invalid("'from' must be before 'to', by 31 days at most.", "from")
    return begin_s, end_s


def show_time(at_s: float) -> str:
    """Return a time as ISO 8601 in UTC."""
    return datetime.fromtimestamp(at_s, tz=UTC).isoformat(timespec="milliseconds")
