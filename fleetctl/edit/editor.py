"""The user's editor, on a file of ours: it has the terminal until it ends."""

import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fleetctl.errors import FleetctlError


class Editor:
    """A command that edits the file which is named to it last."""

    def __init__(self, command: str, suffix: str) -> None:
        self._words = _words(command)
        self._suffix = suffix

    def edited(self, text: str) -> str:
        """Open the text; return what it is when the editor has ended. Waits for a person, and as long as one likes.

        Raises:
            FleetctlError: the editor is not there, or did not end well; or what it left is no text.

        """
        with tempfile.TemporaryDirectory(prefix="fleetctl-edit-") as folder:
            path = Path(folder) / f"edit{self._suffix}"
            path.write_bytes(text.encode())
            self._run(path)
            try:
                return path.read_bytes().decode()
            except FileNotFoundError:
                return ""
            except UnicodeDecodeError as error:
                raise FleetctlError(
                    f"what {self._words[0]} left is not UTF-8; nothing was changed"
                ) from error

    def _run(self, path: Path) -> None:
        name = self._words[0]
        try:
            with _deaf():
                code = subprocess.run([*self._words, str(path)], check=False).returncode
        except OSError as error:
            raise FleetctlError(
                f"the editor {name!r} cannot be started: {error.strerror}. Say which one to use with "
                "FLEETCTL_EDITOR or EDITOR, such as EDITOR=nano"
            ) from error
        if code:
            raise FleetctlError(f"the editor {name!r} ended with code {code}; nothing was changed")


def kept(text: str, suffix: str) -> Path:
    """Write down what the user wrote, so that a refusal does not lose it; return where."""
    number, name = tempfile.mkstemp(prefix="fleetctl-edit-", suffix=suffix)
    with os.fdopen(number, "wb") as file:
        file.write(text.encode())
    return Path(name)


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise FleetctlError(f"the editor {command!r} is no command: {error}") from error
    if not words:
        raise FleetctlError("the editor's command is empty; write such as EDITOR=nano")
    return words


@contextmanager
def _deaf() -> Iterator[None]:
    """Leave Ctrl-C to the editor, which knows what it means there.

    By a handler of our own, which the editor does not inherit as it would that the signal is ignored.
    """

    def nothing(_: int, __: FrameType | None) -> None:
        return

    before: Callable[[int, FrameType | None], object] | int | None
    before = signal.signal(signal.SIGINT, nothing)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
