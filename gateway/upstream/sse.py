"""Where server-sent events end. Pure; looks at no event's content."""

# A single event larger than this is passed on in parts: memory matters more than whole events.
_HELD_LIMIT = 1 << 20


def whole_events(held: bytes, piece: bytes, limit: int = _HELD_LIMIT) -> tuple[bytes, bytes]:
    """Return what may be passed on, and the beginning of an event that is not all there yet.

    Half an event must not be passed on: if the engine dies then, no error event could follow it.
    """
    if not held and piece.endswith(b"\n\n"):
        return piece, b""
    data = held + piece
    end = max(_end(data, b"\n\n"), _end(data, b"\r\n\r\n"))
    if len(data) - end > limit:
        return data, b""
    return data[:end], data[end:]


def _end(data: bytes, separator: bytes) -> int:
    at = data.rfind(separator)
    return 0 if at < 0 else at + len(separator)
