"""Colours and the progress line: on terminals only, unless the environment decides."""

import fcntl
import io
import os
import struct
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from fleetctl.cli import terminal
from tests.support.fleet import Fleet, fleetctl


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


def test_style_adds_a_colour_or_nothing(screen: tuple[TextIO, int]) -> None:
    assert terminal.style("well", "good", screen[0]) == "\x1b[32mwell\x1b[0m"
    assert terminal.style("well", "good", io.StringIO()) == "well"
    assert terminal.style("", "bad", screen[0]) == ""


def test_progress_is_one_line_that_is_erased(screen: tuple[TextIO, int]) -> None:
    stream, line = screen
    with terminal.ProgressLine(stream) as progress:
        progress.show("1 of 2 things, and many more words")
        progress.show("2 of 2")
        progress.say("a warning")
    shown = ""
    while not shown.endswith("\n"):  # a terminal may deliver each write on its own
        shown += os.read(line, 4096).decode()
    assert shown == "\r\x1b[K1 of 2 things, and \r\x1b[K2 of 2\r\x1b[Ka warning\r\n"


def test_without_a_terminal_only_permanent_lines_are_written() -> None:
    stream = io.StringIO()
    with terminal.ProgressLine(stream) as progress:
        progress.show("1 of 2")
        progress.say("a warning")
    assert stream.getvalue() == "a warning\n"


async def test_commands_respect_no_color_and_force_color(
    shared: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("doctor", "--etcd", str(shared.etcd.address))
    assert "\x1b" not in (await fleetctl(*where)).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert (await fleetctl(*where)).out.startswith("\x1b[32mOK  \x1b[0m  store")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in (await fleetctl(*where)).out
