"""The Date header of an HTTP answer, which tells how far two clocks are apart."""

from datetime import datetime
from email.utils import parsedate_to_datetime


def seconds_ahead(date: str, now: datetime) -> float | None:
    """Return how far the sender's clock is ahead of `now`, in seconds (RFC 9110, 6.6.1); None without a valid date."""
    try:
        return (parsedate_to_datetime(date) - now).total_seconds()
    except (ValueError, TypeError):  # TypeError: a date without its zone
        return None
