"""The power of this machine: putting it to sleep, keeping it from sleeping, and waking others. Thin over macOS.

Nothing here has run on a Mac.
"""

import asyncio
import os
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from machinery import macos_commands
from machinery.clock import Clock
from machinery.macos_commands import MacCommand
from nodeagent.hardware import system_text
from schemas.power import WakePacket

# "discard": any port does, because the network card reads the packet.
_WAKE_PORT: Final = 9
# A packet of UDP may be lost.
_COPIES: Final = 3
_POLL_S: Final = 1.0
# Programs that were asked to agree have 30 s (IOPMLib); then macOS sleeps all the same.
_SLEEP_LIMIT_S: Final = 60.0
# `elapsed()` and `monotonic()` differ by the time that the machine slept.
_SLEPT_S: Final = 2.0


def magic_packet(hardware_address: str) -> bytes:
    """Return the payload that wakes a network card: six bytes of 255, then its address sixteen times."""
    return b"\xff" * 6 + bytes.fromhex(hardware_address.replace(":", "")) * 16


def send_packets(packets: Sequence[WakePacket], port: int = _WAKE_PORT) -> None:
    """Broadcast magic packets.

    Raises:
        OSError: a network is down.

    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        for packet in packets:
            for _ in range(_COPIES):
                sender.sendto(magic_packet(packet.hardware_address), (packet.broadcast, port))


class MachineSleeper(Protocol):
    """The port to the machine's sleep."""

    async def suspend(self) -> bool:
        """Put the machine to sleep, and return once it is awake again; False if it did not sleep."""
        ...


class MacSleeper:
    """Sleep of a Mac (`MachineSleeper`)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def suspend(self) -> bool:
        """Ask macOS to sleep, and wait until the clocks show that it did."""
        before, limit = self._slept_s(), self._clock.monotonic() + _SLEEP_LIMIT_S
        await system_text.command_output(macos_commands.SLEEP_NOW.argv(), timeout_s=10.0)
        while self._clock.monotonic() < limit:
            if self._slept_s() - before > _SLEPT_S:
                return True
            await self._clock.sleep(_POLL_S)
        return False

    def _slept_s(self) -> float:
        return self._clock.elapsed() - self._clock.monotonic()


class PowerAssertion:
    """An assertion against idle sleep, which a child process holds for as long as it lives."""

    def __init__(self, command: MacCommand = macos_commands.KEEP_AWAKE) -> None:
        self._command = command
        self._process: Process | None = None
        self.is_forced = False
        """True if a pool asks for a machine that is always on."""

    @property
    def is_held(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def hold(self) -> None:
        """Hold the assertion; a missing program is ignored."""
        if self.is_held:
            return
        with suppress(OSError):
            self._process = await asyncio.create_subprocess_exec(
                *self._command.argv(pid=str(os.getpid())),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=DEVNULL,
            )

    async def release(self) -> None:
        """Release the assertion."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
