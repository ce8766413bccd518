"""Test scripts as child processes, to be killed and frozen."""

import signal
from pathlib import Path

from machinery.clock import SystemClock
from machinery.processes import ChildProcess, spawn, wait_ended

_HERE = Path(__file__).parent
_ROOT = _HERE.parent.parent


class Script:
    """One running script; `lines` holds its output so far."""

    def __init__(self, name: str, python: str, folder: Path, *arguments: str) -> None:
        self._log = folder / f"{name}-{arguments[-1]}.log"
        module = f"{_HERE.relative_to(_ROOT).as_posix().replace('/', '.')}.{name}"
        self.child: ChildProcess = spawn(
            (python, "-m", module, *arguments), log=self._log, cwd=_ROOT
        )

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def said(self, word: str) -> str:
        """Return the last line that begins with the word, or an empty string."""
        return next((line for line in reversed(self.lines) if line.startswith(word)), "")

    async def kill(self) -> None:
        """Kill it, and wait until it has exited."""
        self.child.send(signal.SIGKILL)
        assert await wait_ended(self.child, SystemClock(), limit_s=10)
