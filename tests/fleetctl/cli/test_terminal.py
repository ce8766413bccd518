"""Colours and the progress line: on terminals only, unless the environment decides."""

import fcntl
import io
import os
import re
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from fleetctl.cli import terminal
from tests.support.fleet import Fleet, fleetctl

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def screen() -> Iterator[tuple[TextIO, int]]:
    """Return a terminal of twenty columns to write to, and where it is read."""
    ours, theirs = os.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        yield stream, ours
    os.close(ours)


@pytest.mark.parametrize(
    ("environ", "on_terminal", "elsewhere"),
    [
        pytest.param({}, True, False, id="nothing-said"),
        pytest.param({"NO_COLOR": "1"}, False, False, id="none"),
        pytest.param({"NO_COLOR": ""}, True, False, id="empty-is-not-set"),
        pytest.param({"TERM": "dumb"}, False, False, id="dumb"),
        pytest.param({"FORCE_COLOR": "1"}, True, True, id="forced"),
        pytest.param({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True, id="forced-on-dumb"),
        pytest.param({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False, id="both"),
    ],
)
def test_when_colours_are_written(
    environ: dict[str, str],
    on_terminal: bool,
    elsewhere: bool,
    monkeypatch: pytest.MonkeyPatch,
    screen: tuple[TextIO, int],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert terminal.has_colours(screen[0]) is on_terminal
    assert terminal.has_colours(io.StringIO()) is elsewhere


def shown(line: int, end: str) -> str:
    """Return what the terminal got, up to `end`."""
    text = b""
    while not text.endswith(end.encode()):  # a terminal may deliver each write on its own
        text += os.read(line, 4096)
    return text.decode()


def test_style_adds_a_colour_or_nothing(screen: tuple[TextIO, int]) -> None:
    stream = terminal.TerminalStream(screen[0])
    stream.write(terminal.style("well", "good", screen[0]) + "\n")
    stream.flush()
    assert shown(screen[1], "\n") == "\x1b[32mwell\x1b[0m\r\n"
    assert terminal.style("well", "good", io.StringIO()) == "well"
    assert terminal.style("", "bad", screen[0]) == ""


def test_progress_is_one_line_that_is_erased(screen: tuple[TextIO, int]) -> None:
    stream, line = screen
    with terminal.ProgressLine(stream) as progress:
        progress.show("1 of 2 things, and many more words")
        progress.show("2 of 2")
        progress.say("a warning")
    assert shown(line, "\n") == "\r\x1b[K1 of 2 things, and \r\x1b[K2 of 2\r\x1b[Ka warning\r\n"


def test_without_a_terminal_only_permanent_lines_are_written() -> None:
    stream = io.StringIO()
    with terminal.ProgressLine(stream) as progress:
        progress.show("1 of 2")
        progress.say("a warning")
    assert stream.getvalue() == "a warning\n"


# What a terminal must not get from elsewhere, and what it gets.
HOSTILE = [
    pytest.param("\x1b]0;title\x07", "␛]0;title␇", id="title"),
    pytest.param("\x1b]52;c;cm0=\x1b\\", "␛]52;c;cm0=␛\\", id="clipboard"),
    pytest.param("\x1b[2J\x1b[1;1H", "␛[2J␛[1;1H", id="cursor"),
    pytest.param("\x1b[32mReady\x1b[0m", "␛[32mReady␛[0m", id="colours-like-ours"),
    pytest.param("no\ryes", "no␍yes", id="overwritten"),
    pytest.param("no\x9b2J", "no\ufffd2J", id="eight-bits"),
    pytest.param("a\u202eb", "a\ufffdb", id="other-direction"),
    pytest.param("a\r\n\tä", "a\r\n\tä", id="harmless"),
]


@pytest.mark.parametrize(("text", "expected"), HOSTILE)
def test_a_terminal_gets_no_control_characters_from_elsewhere(
    text: str, expected: str, screen: tuple[TextIO, int]
) -> None:
    stream = terminal.TerminalStream(screen[0])
    stream.write(f"{terminal.paint(text, 'bad')}.\n")
    stream.flush()
    assert shown(screen[1], ".\r\n") == f"\x1b[31m{expected}\x1b[0m.\r\n"
    stream.buffer.write(f"{text}.\n".encode())
    stream.buffer.flush()
    assert shown(screen[1], ".\r\n") == f"{expected}.\r\n"


def test_a_character_in_two_pieces_stays_whole(screen: tuple[TextIO, int]) -> None:
    stream = terminal.TerminalStream(screen[0])
    for piece in ("ä".encode()[:1], "ä".encode()[1:] + b"\n"):
        stream.buffer.write(piece)
    stream.flush()
    assert shown(screen[1], "\n") == "ä\r\n"


def test_progress_has_no_control_characters_from_elsewhere(screen: tuple[TextIO, int]) -> None:
    with terminal.ProgressLine(screen[0]) as progress:
        progress.show("a\x1b[2J")
        progress.say("b\x1b[2J")
    assert shown(screen[1], "\n") == "\r\x1b[Ka␛[2J\r\x1b[Kb␛[2J\r\n"


# Modules that write escape codes of a library to a terminal, and clean the text in them.
UNFILTERED = {"fleetctl/cli/terminal.py", "fleetctl/verbs/top.py", "fleetctl/verbs/demo.py"}
PAST_THE_FILTER = re.compile(
    r"sys\.__std|\bos\.write\(|\bopen\(1\b|/dev/(tty|std)|unfiltered|click\.style|secho|\\x1b|\\033"
)


def test_no_verb_writes_past_the_filter() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "fleetctl").rglob("*.py")
        if PAST_THE_FILTER.search(path.read_text())
    }
    assert found == UNFILTERED


async def test_commands_respect_no_color_and_force_color(
    shared: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("doctor", "--etcd", str(shared.etcd.address))
    assert "\x1b" not in (await fleetctl(*where)).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert (await fleetctl(*where)).out.startswith("\x1b[32mOK  \x1b[0m  store")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in (await fleetctl(*where)).out
