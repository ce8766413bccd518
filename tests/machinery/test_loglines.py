"""Where in a log to begin."""

import io
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery import loglines
from machinery.loglines import Want, begin, lines_backwards, time_of

START = datetime(2026, 1, 1, tzinfo=UTC)


def entry(second: int) -> bytes:
    at = (START + timedelta(seconds=second)).isoformat(timespec="milliseconds")
    return f'{{"time": "{at}", "message": "m{second}"}}'.encode()


def shown(text: bytes, want: Want) -> bytes:
    def backwards() -> Iterator[tuple[int, bytes]]:
        return lines_backwards(io.BytesIO(text), 0, len(text))

    at = begin(backwards, want, end=len(text))
    return text[0 if at is None else at :]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(entry(5), START + timedelta(seconds=5), id="ours"),
        pytest.param(b'{"time":"2026-01-01T00:00:05Z"}', START + timedelta(seconds=5), id="z"),
        pytest.param(b'{"time": "2026-01-01T00:00:05"}', None, id="no-zone"),
        pytest.param(b'{"time": "2026-99-01T00:00:05Z"}', None, id="no-time"),
        pytest.param(b"Traceback (most recent call last):", None, id="a-traceback"),
        pytest.param(b"", None, id="empty"),
    ],
)
def test_the_time_of_a_line(line: bytes, expected: datetime | None) -> None:
    assert time_of(line) == expected


LOG = b"".join(
    line + b"\n" for line in (entry(1), b"trace 1", entry(2), b"trace 2", b"more 2", entry(3))
)


@pytest.mark.parametrize(
    ("lines", "since_s", "expected"),
    [
        pytest.param(None, None, LOG, id="all"),
        pytest.param(0, None, b"", id="nothing"),
        pytest.param(1, None, entry(3) + b"\n", id="the-last"),
        pytest.param(2, None, b"more 2\n" + entry(3) + b"\n", id="two"),
        pytest.param(99, None, LOG, id="more-than-there-are"),
        pytest.param(None, 4, b"", id="since-after-all"),
        pytest.param(None, 3, entry(3) + b"\n", id="since-the-last"),
        pytest.param(None, 2, LOG[LOG.index(entry(2)) :], id="a-traceback-goes-with-its-line"),
        pytest.param(None, 0, LOG, id="since-before-all"),
        pytest.param(1, 2, entry(3) + b"\n", id="both-lines-are-fewer"),
        pytest.param(5, 3, entry(3) + b"\n", id="both-since-is-fewer"),
    ],
)
def test_what_is_shown(lines: int | None, since_s: int | None, expected: bytes) -> None:
    since = None if since_s is None else START + timedelta(seconds=since_s)
    assert shown(LOG, Want(lines=lines, since=since)) == expected


def test_lines_without_times_are_shown_whatever_the_time() -> None:
    text = b"free(): invalid pointer\nAborted\n"
    assert shown(text, Want(since=START)) == text


@given(
    st.lists(st.binary(max_size=40).filter(lambda b: b"\n" not in b), max_size=30), st.booleans()
)
def test_lines_backwards_are_the_lines(lines: list[bytes], is_ended: bool) -> None:
    text = b"\n".join(lines) + (b"\n" if is_ended and lines else b"")
    found = list(lines_backwards(io.BytesIO(text), 0, len(text)))
    expected = text.removesuffix(b"\n").split(b"\n") if text else []
    assert [line for _, line in reversed(found)] == expected
    assert all(text[at : at + len(line)] == line for at, line in found)


def test_a_line_longer_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loglines, "_BLOCK", 7)
    monkeypatch.setattr(loglines, "_LONGEST", 20)
    text = b"first\n" + b"x" * 100 + b"\nlast"
    found = list(lines_backwards(io.BytesIO(text), 0, len(text)))
    assert found[0] == (107, b"last")
    assert found[-1] == (0, b"first")
    # In pieces, none of which is larger than was allowed by more than a block.
    assert b"".join(line for _, line in reversed(found[1:-1])) == b"x" * 100
    assert max(len(line) for _, line in found) <= 27


def test_only_between_the_offsets() -> None:
    text = b"one\ntwo\nthree\n"
    assert list(lines_backwards(io.BytesIO(text), 4, 8)) == [(4, b"two")]
    assert list(lines_backwards(io.BytesIO(text), 4, 4)) == []
