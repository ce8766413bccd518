"""Markers in server-sent events that engine, gateway and fleetctl must spell alike."""

from typing import Final

DATA: Final = b"data: "
"""The beginning of an event's line of data."""
END: Final = b"\n\n"
"""The end of an event."""
DONE: Final = b"data: [DONE]\n\n"
"""OpenAI's last event of a stream that is complete."""
WAITING: Final = b": waiting\n\n"
"""A comment that keeps an idle stream alive; clients skip it."""
RESUME_FIELD: Final = "fleet"
"""The field of a request body with which a gateway continues an answer on another engine."""
