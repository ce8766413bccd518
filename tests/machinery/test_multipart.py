"""Forms: what clients send, what is broken, and what would be slow."""

import time

import pytest

from machinery import multipart
from machinery.multipart import MultipartError

TYPE = "multipart/form-data; boundary=XX"


def body(*parts: tuple[str, bytes]) -> bytes:
    blocks = [
        b"--XX\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n" for head, content in parts
    ]
    return b"".join(blocks) + b"--XX--\r\n"


def test_fields_and_files_are_read_as_they_were_sent() -> None:
    sent = body(
        ('content-disposition: form-data; name="model"', b"whisper"),
        (
            'Content-Disposition: form-data; name="file"; filename="a b.wav"\r\nContent-Type: audio/wav',
            b"\r\n--X\r\n\x00--XX",
        ),
        ('content-disposition: form-data; name="empty"', b""),
    )
    parts = multipart.parse(TYPE, sent)
    assert [(p.name, p.filename, bytes(p.content)) for p in parts] == [
        ("model", None, b"whisper"),
        ("file", "a b.wav", b"\r\n--X\r\n\x00--XX"),
        ("empty", None, b""),
    ]
    assert multipart.parse(TYPE, b"preamble\r\n" + sent)[0].name == "model"


NAMED = 'content-disposition: form-data; name="a"'


@pytest.mark.parametrize(
    ("kind", "sent", "words"),
    [
        ("application/json", b"{}", "must be multipart/form-data"),
        ("multipart/form-data", body((NAMED, b"x")), "no valid boundary"),
        ("multipart/form-data; boundary=" + "x" * 71, b"", "no valid boundary"),
        (TYPE, b"", "does not have the boundary"),
        (TYPE, body((NAMED, b"x"))[:-6], "cut short"),
        (TYPE, body(("content-type: text/plain", b"x")), "no name"),
        (TYPE, body(("x-long: " + "y" * 5000, b"x")), "cut short"),
        (TYPE, b"--XXY\r\n", "not followed by a line end"),
        (TYPE, body(*[(NAMED, b"x")] * 33), "more than 32 fields"),
    ],
)
def test_what_is_no_form_is_refused_with_a_reason(kind: str, sent: bytes, words: str) -> None:
    with pytest.raises(MultipartError, match=words):
        multipart.parse(kind, sent)


def test_a_body_full_of_almost_boundaries_is_read_in_linear_time() -> None:
    hostile = body((NAMED, b"\r\n--X" * 5_000_000))
    started = time.process_time()
    assert len(multipart.parse(TYPE, hostile)[0].content) == 25_000_000
    assert time.process_time() - started < 5
