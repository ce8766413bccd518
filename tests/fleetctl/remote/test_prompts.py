"""Tests of questions at a real pseudo-terminal."""

import asyncio
import os
import sys
import termios
from collections.abc import Iterator

import pytest

from fleetctl.remote.prompts import TerminalPrompts, find_prompts
from tests.support.waiting import until


class Person:
    """The other end of the terminal."""

    def __init__(self, line: int, terminal: int) -> None:
        self._line = line
        self._terminal = terminal

    @property
    def is_echoing(self) -> bool:
        return bool(termios.tcgetattr(self._terminal)[3] & termios.ECHO)

    def types(self, text: str) -> None:
        os.write(self._line, text.encode())

    def sees(self) -> str:
        os.set_blocking(self._line, False)
        try:
            return os.read(self._line, 65536).decode()
        except BlockingIOError:
            return ""


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> Iterator[Person]:
    line, terminal = os.openpty()
    with os.fdopen(terminal, "r", closefd=True) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield Person(line, terminal)
    os.close(line)


async def test_a_password_is_not_shown(person: Person, capsys: pytest.CaptureFixture[str]) -> None:
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(TerminalPrompts().secret("Password of me@mac"))
        await until(lambda: not person.is_echoing)
        person.types("correct horse\n")
    assert asked.result() == "correct horse"
    assert "correct" not in person.sees()
    assert person.is_echoing
    assert capsys.readouterr().err == "Password of me@mac: \n"


async def test_an_interrupted_question_leaves_the_terminal_as_it_was(person: Person) -> None:
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(TerminalPrompts().secret("Password"))
        await until(lambda: not person.is_echoing)
        asked.cancel()
    assert person.is_echoing


async def test_questions_come_one_after_the_other(
    person: Person, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = TerminalPrompts()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(prompts.confirm("Is it the same?"))
        second = group.create_task(prompts.secret("Password"))
        await until(lambda: "same?" in (seen := capsys.readouterr().err) and "Password" not in seen)
        assert person.is_echoing
        person.types("yes\n")
        await until(lambda: not person.is_echoing)
        person.types("word\n")
    assert first.result() is True
    assert second.result() == "word"


@pytest.mark.parametrize("answer", ["\n", "n\n", "ok\n"])
async def test_only_yes_is_yes(person: Person, answer: str) -> None:
    person.types(answer)
    assert await TerminalPrompts().confirm("Is it the same?") is False


def test_scripts_have_no_prompts() -> None:
    assert find_prompts() is None
