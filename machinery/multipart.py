"""Parser of `multipart/form-data` bodies that are in memory whole: linear, without copies of files."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from typing import Final

MEDIA_TYPE: Final = "multipart/form-data"
MAX_PARTS: Final = 32
"""Parts that a form may have."""
_MAX_HEAD_BYTES: Final = 4 << 10
# RFC 2046: at most 70 characters.
_BOUNDARY: Final = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{1,70}", re.ASCII)


class MultipartError(ValueError):
    """The body is no form; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One field of a form."""

    name: str
    filename: str | None
    """None if it is no file."""
    content: memoryview


def parse(content_type: str, body: bytes | bytearray) -> list[Part]:
    """Return the parts of a form.

    Raises:
        MultipartError: the body or its type is not one of a form, or it has too many parts.

    """
    return list(_parts(_boundary(content_type), body))


def _boundary(content_type: str) -> bytes:
    kind, parameters = _parameters("content-type", content_type)
    if kind.lower() != MEDIA_TYPE:
        raise MultipartError(f"the body must be {MEDIA_TYPE}, not {kind[:50]!r}")
    boundary = parameters.get("boundary", "")
    if not _BOUNDARY.fullmatch(boundary):
        raise MultipartError("content-type has no valid boundary")
    return boundary.encode("ascii")


def _parts(boundary: bytes, body: bytes | bytearray) -> Iterator[Part]:
    mark, view = b"\r\n--" + boundary, memoryview(body)
    # The first boundary may be the beginning of the body.
    position = 0 if body.startswith(mark[2:]) else body.find(mark) + 2
    if position == 1:
        raise MultipartError("the body does not have the boundary of its content-type")
    position += len(mark) - 2
    for _ in range(MAX_PARTS + 1):
        if body[position : position + 2] == b"--":
            return
        if body[position : position + 2] != b"\r\n":
            raise MultipartError("a boundary is not followed by a line end")
        head_end = body.find(b"\r\n\r\n", position, position + _MAX_HEAD_BYTES)
        end = body.find(mark, head_end + 2) if head_end >= 0 else -1
        if head_end < 0 or end < 0:
            what = "the end of its headers" if head_end < 0 else "its last boundary"
            raise MultipartError(f"the body was cut short: a part lacks {what}")
        name, filename = _disposition(bytes(body[position + 2 : head_end]))
        yield Part(name=name, filename=filename, content=view[min(head_end + 4, end) : end])
        position = end + len(mark)
    raise MultipartError(f"the form has more than {MAX_PARTS} fields")


def _disposition(head: bytes) -> tuple[str, str | None]:
    """Return the name of a part, and that of its file."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            kind, parameters = _parameters("content-disposition", value)
            if kind.lower() == "form-data" and parameters.get("name"):
                return parameters["name"], parameters.get("filename")
    raise MultipartError("a part has no name")


def _parameters(header: str, value: str) -> tuple[str, dict[str, str]]:
    """Return the value of a header and its parameters."""
    message = Message()
    message[header] = " ".join(value.split("\n"))
    pairs = message.get_params(header=header) or [("", "")]
    return pairs[0][0], {name.lower(): str(text) for name, text in pairs[1:]}
