"""How an engine's answer ended, by its last bytes: whole, or with a word of why not. Pure.

Engines that cannot go on say so in an error event, and send no [DONE] after it.
"""

import orjson

_DONE = b"data: [DONE]"
# Streams of /v1/responses have no [DONE]. Within an event's data there is no line's end, so no text passes for these.
_RESPONDED = (b"event: response.completed\n", b"event: response.incomplete\n")
# Within texts quotes are escaped.
_TIMEOUT = b'"request_timeout"'
_LONGEST = 300


def is_whole(last: bytes) -> bool:
    """Return whether a stream with this last piece came to its end."""
    return _DONE in last or any(event in last for event in _RESPONDED)


def is_timeout(last: bytes) -> bool:
    """Return whether an answer, or a stream's last piece, says that the request's own time was up."""
    return _TIMEOUT in last


def why(last: bytes) -> str:
    """Return what an engine said last, of a stream that ended before its end."""
    event = last.rstrip().rpartition(b"\n\n")[2]
    try:
        found = orjson.loads(event[event.index(b"{") :])
        said = (found.get("response") or found)["error"]["message"]
    except (ValueError, AttributeError, KeyError, TypeError):
        return "its stream ended before its end"
    return str(said)[:_LONGEST]
