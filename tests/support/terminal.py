"""fleetctl at a pseudo-terminal: what a person types and sees, Ctrl-C included."""

import asyncio
import contextlib
import fcntl
import os
import struct
import sys
import termios
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

_LIMIT_S, _PRESSED_AGAIN_S = 60.0, 2.0
# The command gets the terminal as its own, so that Ctrl-C reaches it as a signal.
_MAIN = (
    "import os, runpy; os.login_tty(os.dup(0)); "
    "runpy.run_module('fleetctl', run_name='__main__', alter_sys=True)"
)


class Terminal:
    """A terminal with fleetctl in it."""

    def __init__(self, process: asyncio.subprocess.Process, line: int) -> None:
        self._process = process
        self._line = line
        self._news = asyncio.Event()
        self._unread = ""
        self.seen = ""
        """Everything that was shown."""

    def listen(self) -> None:
        """Take what is shown as it comes."""
        asyncio.get_running_loop().add_reader(self._line, self._take)

    def _take(self) -> None:
        try:
            text = os.read(self._line, 65536).decode(errors="replace")
        except OSError:  # Linux' way to say that nobody has the terminal open
            text = ""
        if not text:
            asyncio.get_running_loop().remove_reader(self._line)
        self._unread += text
        self.seen += text
        self._news.set()

    async def until(self, text: str) -> str:
        """Return what is shown up to the text and with it, since the last call."""
        try:
            async with asyncio.timeout(_LIMIT_S):
                return await self._until(text)
        except TimeoutError:
            raise AssertionError(f"{text!r} was not shown, but {self.seen!r}") from None

    async def _until(self, text: str) -> str:
        while text not in self._unread:
            self._news.clear()
            await self._news.wait()
        before, found, self._unread = self._unread.partition(text)
        return before + found

    def type(self, text: str) -> None:
        """Type; a line ends with Enter, which is a carriage return."""
        os.write(self._line, text.encode())

    async def interrupt_prompt(self, text: str) -> None:
        """Press Ctrl-C at a prompt until the text is shown.

        Python loses an interruption between readline's prompt and the select() after it: nothing wakes that up before
        the next key.
        """
        for _ in range(30):
            self.type(CTRL_C)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PRESSED_AGAIN_S):
                    await self._until(text)
                    return
        raise AssertionError(f"{text!r} was not shown, but {self.seen!r}")

    async def ended(self) -> int:
        """Wait for the command's end; return its exit code."""
        async with asyncio.timeout(_LIMIT_S):
            return await self._process.wait()


CTRL_C, CTRL_D, ENTER, TAB, UP = "\x03", "\x04", "\r", "\t", "\x1b[A"


@asynccontextmanager
async def terminal(
    *words: str, environ: Mapping[str, str] | None = None, columns: int = 120
) -> AsyncIterator[Terminal]:
    """Run fleetctl in a terminal of so many columns; it does not outlive the block."""
    ours, theirs = os.openpty()
    try:
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _MAIN, *words),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", **(environ or {})},
        )
    finally:
        os.close(theirs)
    shown = Terminal(process, ours)
    try:
        shown.listen()
        yield shown
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)
