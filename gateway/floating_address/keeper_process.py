"""The keeper as a child process of the gateway: its start, its messages, and its end."""

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE, Process
from ipaddress import IPv4Interface
from typing import Final

from machinery.clock import Clock
from machinery.environment import environment_without_secrets

log = logging.getLogger(__name__)

_MODULE: Final = "gateway.floating_address.keeper"
_LONGEST_LINE = 4096
# The keeper removes the address with one command.
_END_S = 3.0


class KeeperProcess:
    """A keeper that is started when it is needed, and started again when it has died."""

    def __init__(self, address: IPv4Interface, interface: str, clock: Clock) -> None:
        self._arguments = (str(address), interface)
        self._clock = clock
        self._process: Process | None = None
        self._started = asyncio.Event()
        self.is_held = False
        self.failure = ""
        """The reason for which the keeper cannot hold the address; "" while it can."""

    async def run(self) -> None:
        """Read what the keepers say, until cancelled."""
        while True:
            await self._started.wait()
            self._started.clear()
            if self._process is not None:
                await self._read(self._process)

    async def hold(self, seconds: float, *, has_lease: bool) -> None:
        """Make the keeper have the address for so long."""
        await self._send(f"hold {seconds:.3f} {'lease' if has_lease else 'alone'}")

    async def release(self) -> None:
        """Remove the address, also one that an earlier keeper has left behind."""
        await self._send("release")

    async def close(self) -> None:
        """Remove the address if this keeper has it, and end the keeper."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.wait()
        self.is_held = False

    async def _send(self, line: str) -> None:
        try:
            if self._process is None or self._process.returncode is not None:
                self.is_held = False
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", _MODULE, *self._arguments),
                    stdin=PIPE,
                    stdout=PIPE,
                    limit=_LONGEST_LINE,
                    env=environment_without_secrets(),
                    # Signals for the gateway's group must not end it before it has removed the address.
                    start_new_session=True,
                )
                self._started.set()
            process = self._process
            assert process.stdin is not None
            process.stdin.write(f"{line}\n".encode())
            await process.stdin.drain()
        except (
            OSError
        ) as error:  # it has died, or cannot be started; the next line starts another one
            self._process = None
            self.failure = f"the keeper of the address has ended: {error}"

    async def _read(self, process: Process) -> None:
        """Note what the keeper says, until it ends."""
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # a line that is too long
            async for raw in process.stdout:
                self._note(raw.decode(errors="replace").strip())
        self.is_held = False

    def _note(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word in ("held", "released"):
            self.is_held = word == "held"
            log.info("floating address", extra={"address": self._arguments[0], "state": word})
        elif word == "claimed":
            log.warning(
                "another machine claims the floating address",
                extra={"address": self._arguments[0], "mac": rest},
            )
        elif word == "failed":
            self.failure = rest
            log.warning(
                "floating address not held", extra={"address": self._arguments[0], "why": rest}
            )
