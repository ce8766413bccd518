"""The log of a process: JSON lines, the start of a selection, and the ring in memory."""

import asyncio
import importlib
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery import process_log
from machinery.clock import SystemClock
from machinery.process_log import (
    JsonFormatter,
    LogLine,
    LogRing,
    LogSelection,
    TextFormatter,
    lines_backwards,
    parse_line,
    parse_time,
    start_position,
    stream_ring,
)


def line(
    message: str, *arguments: object, extra: dict[str, Any] | None = None, level: int = logging.INFO
) -> dict[str, Any]:
    logger = logging.Logger("store.etcd.http.json_api")  # noqa: LOG001 - a logger of this test only
    record = logger.makeRecord(
        logger.name, level, "file.py", 1, message, arguments, None, extra=extra
    )
    text = JsonFormatter("gateway").format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_has_time_level_process_logger_message_and_fields() -> None:
    found = line("lease %s", "lost", extra={"lease": 7, "key": "a\nb"}, level=logging.WARNING)
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "level": "warning",
        "process": "gateway",
        "logger": "store.etcd.http.json_api",
        "message": "lease lost",
        "lease": 7,
        "key": "a\nb",
    }


@pytest.mark.parametrize(("value", "expected"), [
    pytest.param(Path("/a"), "/a", id="path"),
    pytest.param({"a": (1, None)}, {"a": [1, None]}, id="nested"),
    pytest.param("grüße 日本", "grüße 日本", id="unicode"),
    pytest.param("\udcff", "\udcff", id="no-text"),
    pytest.param(b"x", "b'x'", id="bytes"),
])  # fmt: skip
def test_fields_of_any_type_are_written(value: object, expected: object) -> None:
    assert line("m", extra={"field": value})["field"] == expected


def test_an_extra_field_does_not_replace_a_standard_one() -> None:
    found = line("m", extra={"level": "mine", "logger": "mine", "time": "mine"})
    assert (found["level"], found["logger"]) == ("info", "store.etcd.http.json_api")
    assert found["time"] != "mine"


def test_setup_writes_lines_to_stderr_and_keeps_chatty_libraries_down() -> None:
    code = (
        "import logging; from machinery import process_log; process_log.setup('p', 'debug');"
        "logging.getLogger('aiohttp.access').info('chatty');"
        "logging.getLogger('x').debug('fine');\n"
        "try: 1 / 0\nexcept ZeroDivisionError: logging.getLogger('x').exception('bad')"
    )
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    lines = [json.loads(text) for text in done.stderr.splitlines()]
    assert [found["message"] for found in lines] == ["fine", "bad"]
    assert "ZeroDivisionError" in lines[1]["traceback"]
    assert done.stdout == ""


def test_a_log_file_is_private_and_rotated_and_a_full_disk_costs_lines_only(tmp_path: Path) -> None:
    code = (
        "import logging, resource, signal, sys; from pathlib import Path; from machinery import process_log\n"
        "process_log.setup('p', file=Path(sys.argv[1]))\n"
        "say = logging.getLogger('x').info\n"
        "for n in range(2300): say('a long line', extra={'number': n, 'text': 'x' * 8000})\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))\n"
        "say('the disk is full')\n"
    )
    path = tmp_path / "p.log"
    root = Path(__file__).parent.parent.parent
    words = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=root)
    assert json.loads(done.stderr.splitlines()[-1])["message"] == "the disk is full"
    assert "Traceback" not in done.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["p.log", "p.log.1"]
    older, newer = path.with_name("p.log.1").read_bytes(), path.read_bytes()
    numbers = [json.loads(one)["number"] for one in (older + newer).splitlines()]
    assert numbers == list(range(2300))
    assert {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {0o600}


def text_line(message: str, **extra: object) -> str:
    logger = logging.Logger("store.lease")  # noqa: LOG001 - a logger of this test only
    record = logger.makeRecord(
        logger.name, logging.WARNING, "file.py", 1, message, (), None, extra=extra
    )
    record.created = datetime(2026, 1, 1, 12, 30, 1, 250_000).astimezone().timestamp()
    return TextFormatter().format(record)


def test_a_line_of_text_has_local_time_level_logger_message_and_fields() -> None:
    assert text_line("lease lost", lease=7, node="mac-1", why="no answer", left=None) == (
        '2026-01-01 12:30:01.250 WARNING store.lease: lease lost lease=7 node=mac-1 why="no answer" left=null'
    )


def test_a_line_of_text_cannot_control_the_terminal_or_pretend_to_be_two() -> None:
    line = text_line("lost\n2026 forged", key="\x1b[2J\nforged", path=Path("/a b"))
    assert line.endswith('lost\\n2026 forged key="\\u001b[2J\\nforged" path="/a b"')
    assert text_line("\x1b]0;x\x07").endswith("␛]0;x␇")


def test_a_line_of_json_is_read_as_text() -> None:
    logger = logging.Logger("store.lease")  # noqa: LOG001 - as above
    extra = {"lease": 7, "why": "no answer"}
    record = logger.makeRecord(
        "x", logging.WARNING, "f.py", 1, "lost\nforged", (), None, extra=extra
    )
    record.created = datetime(2026, 1, 1, 12, 30, 1, 250_000).astimezone().timestamp()
    line = parse_line(JsonFormatter("nodeagent").format(record).encode())
    assert line == LogLine(
        time="2026-01-01 12:30:01.250",
        level="WARNING",
        text='lost\\nforged lease=7 why="no answer"',
    )
    assert parse_line(b"engine: no config.json") is None
    assert parse_line(b'{"time": "2026-01-01T00:00:00Z", broken') is None


@pytest.mark.parametrize(("options", "is_text"), [
    pytest.param("", True, id="auto"),
    pytest.param(", log_format='json'", False, id="json"),
    pytest.param(", log_format='text'", True, id="text"),
])  # fmt: skip
def test_the_log_is_text_on_a_terminal(options: str, is_text: bool) -> None:
    code = (
        f"import logging; from machinery import process_log; process_log.setup('p'{options});"
        "logging.getLogger('x').info('fine', extra={'lease': 7})"
    )
    ours, theirs = os.openpty()
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True, cwd=root)
    os.close(theirs)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert shown.strip().endswith("INFO    x: fine lease=7") == is_text
    assert shown.startswith("{") != is_text


@pytest.mark.parametrize("program", ["reconciler", "nodeagent", "nodeagent.hollow", "gateway"])
def test_every_program_takes_the_flags_of_the_log(program: str) -> None:
    main = importlib.import_module(f"{program}.__main__").main
    assert {"log_level", "log_format"} <= {option.name for option in main.params}


START = datetime(2026, 1, 1, tzinfo=UTC)


def entry(second: int) -> bytes:
    at = (START + timedelta(seconds=second)).isoformat(timespec="milliseconds")
    return f'{{"time": "{at}", "message": "m{second}"}}'.encode()


def shown(text: bytes, want: LogSelection) -> bytes:
    def backwards() -> Iterator[tuple[int, bytes]]:
        return lines_backwards(io.BytesIO(text), 0, len(text))

    at = start_position(backwards, want, end=len(text))
    return text[0 if at is None else at :]


@pytest.mark.parametrize(("line", "expected"), [
    pytest.param(entry(5), START + timedelta(seconds=5), id="ours"),
    pytest.param(b'{"time":"2026-01-01T00:00:05Z"}', START + timedelta(seconds=5), id="z"),
    pytest.param(b'{"time": "2026-01-01T00:00:05"}', None, id="no-zone"),
    pytest.param(b'{"time": "2026-99-01T00:00:05Z"}', None, id="no-time"),
    pytest.param(b"Traceback (most recent call last):", None, id="a-traceback"),
    pytest.param(b"", None, id="empty"),
])  # fmt: skip
def test_the_time_of_a_line(line: bytes, expected: datetime | None) -> None:
    assert parse_time(line) == expected


LOG = b"".join(
    line + b"\n" for line in (entry(1), b"trace 1", entry(2), b"trace 2", b"more 2", entry(3))
)


@pytest.mark.parametrize(("lines", "since_s", "expected"), [
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
])  # fmt: skip
def test_what_is_shown(lines: int | None, since_s: int | None, expected: bytes) -> None:
    since = None if since_s is None else START + timedelta(seconds=since_s)
    assert shown(LOG, LogSelection(lines=lines, since=since)) == expected


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
    monkeypatch.setattr(process_log, "_BLOCK_BYTES", 7)
    monkeypatch.setattr(process_log, "_MAX_LINE_BYTES", 20)
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


def logged(ring: LogRing, *messages: str) -> None:
    for message in messages:
        ring.handle(logging.LogRecord("test", logging.INFO, "", 1, message, (), None))


async def never() -> bool:
    return False


async def text(ring: LogRing, want: LogSelection) -> str:
    found = [p async for p in stream_ring(ring, want, SystemClock(), follow=False, is_over=never)]
    return b"".join(found).decode()


async def test_the_last_lines_are_kept_up_to_a_limit() -> None:
    ring = LogRing(limit_bytes=10)
    logged(ring, "one", "two", "three", "four")
    assert ring.numbered() == [(2, b"three"), (3, b"four")]
    assert await text(ring, LogSelection()) == "three\nfour\n"
    logged(ring, "a line that is longer than the limit")
    assert await text(ring, LogSelection()) == "a line tha\n"


async def test_a_follower_gets_later_lines_until_the_end() -> None:
    ring, over, told = LogRing(), False, list[bytes]()
    logged(ring, "before")

    async def is_over() -> bool:
        return over

    async def follow() -> None:
        async for piece in stream_ring(
            ring, LogSelection(lines=0), SystemClock(), follow=True, is_over=is_over
        ):
            told.append(piece)
            heard.set()

    heard = asyncio.Event()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(follow())
        while not heard.is_set():
            logged(ring, "news")
            await asyncio.sleep(0.01)
        over = True
    assert told[0].startswith(b"news\n")


async def test_many_lines_come_in_pieces() -> None:
    ring = LogRing()
    logged(ring, *("x" * 999 for _ in range(200)))
    found = [
        p
        async for p in stream_ring(ring, LogSelection(), SystemClock(), follow=False, is_over=never)
    ]
    assert sum(map(len, found)) == 200_000
    assert max(map(len, found)) < 70_000
