"""Markers of streams."""

from schemas.wire import streams
from schemas.wire.errors import Refusal


def test_markers_are_server_sent_events() -> None:
    assert streams.DONE.startswith(streams.DATA)
    assert streams.DONE.endswith(streams.END)
    assert streams.RESUME_COMMENT.startswith(b":")  # a comment, which clients skip
    event = Refusal(status=500, message="m").event()
    assert event.startswith(streams.DATA)
    assert event.endswith(streams.END)
