"""Limits of bodies that are decoded on the event loop: the values of a body are counted before it is decoded. Pure.

A body of 8 MiB may hold millions of values, and decoding one costs up to half a microsecond. Counting costs 30 ms.
"""

from typing import Final

import msgspec

from schemas.wire.errors import invalid

MAX_VALUES: Final = 1 << 17
"""Values of a request in an API that the gateway translates, and names of values in one that it passes through."""
MAX_MESSAGES: Final = 4096
"""Messages of a request, as engines count them (engine/openai/messages.py)."""
# A body of this size costs milliseconds, whatever it holds.
_SMALL_BYTES: Final = 256 << 10
# All bytes but those that begin or part values, and the quotes of texts.
_NOT_VALUES: Final = bytes(byte for byte in range(256) if byte not in b'"{[,')
_NOT_NAMES: Final = bytes(byte for byte in range(256) if byte not in b'":')
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_values(body: bytes) -> None:
    """Raise RefusedError if a body has too many values, whether or not it is valid JSON."""
    _check(body, _NOT_VALUES, "values")


def decode_members(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the members of a JSON object, whose values stay as they were written.

    Raises:
        RefusedError: the body is no JSON object, or has too many members.

    """
    _check(body, _NOT_NAMES, "names")
    try:
        return _MEMBERS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}") from error
    except RecursionError:
        raise invalid("The body's JSON is nested too deeply.") from None


def _check(body: bytes, others: bytes, what: str) -> None:
    if len(body) <= _SMALL_BYTES:
        return
    # Without escapes, every second piece between quotes is a text.
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, others)
    marks = marks.replace(b'""', b"")
    # A mark stands between two quotes that are left, so every two quotes stand for a value at least.
    if marks.count(b'"') > 2 * MAX_VALUES + 2 or len(b"".join(marks.split(b'"')[::2])) > MAX_VALUES:
        raise invalid(
            f"The body has more than {MAX_VALUES} {what} in lists and objects; send fewer messages, blocks or tools."
        )
