"""The keeper: a child process of a gateway that has the floating address on its interface for as long as it is told to.

It outlives a killed gateway for as long as it takes to remove the address, and it removes the address when the gateway
hangs. It reads lines from its standard input, and writes lines to its standard output:

- `hold SECONDS lease|alone`: have the address for so long; `alone` means without a valid lease.
- `release`: remove it, also one that an earlier keeper left behind. The end of the input removes it, and ends the keeper.
- `held`, `released`, `claimed MAC`, `failed WHY`: what happened.
"""

import math
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Final

from gateway.floating_address.interfaces import FloatingAddressError, parse_address
from gateway.floating_address.links import AddressLink, find_interface, open_link
from machinery.clock import SystemClock

_TICK_S = 0.1
# After the take-over three times, because frames get lost, and then for holders without a lease that listen.
_FIRST_ANNOUNCEMENTS, _FIRST_EVERY_S, _LATER_EVERY_S = 4, 0.4, 1.0
# The kernel's own timer is a reserve for the keeper's.
_RESERVE_S = 1
_READ_BYTES = 4096
_LONGEST_S = 60.0
_LONGEST_LINE = 256


class AddressKeeper:
    """State of one address on one link. Times are those of a clock that counts while the machine sleeps."""

    def __init__(self, link: AddressLink, say: Callable[[str], None]) -> None:
        self._link = link
        self._say = say
        self._ends_at = -math.inf
        self._has_lease = False
        self._is_held = False
        self._announced = 0
        self._announce_at = 0.0

    def handle(self, line: str, now: float) -> None:
        """Carry out one line of the gateway."""
        match line.split():
            case ["hold", seconds, ("lease" | "alone") as right]:
                # A gateway that lost its lease may keep the address, but not take it.
                if right == "lease" or self._is_held:
                    self._hold(now, float(seconds), has_lease=right == "lease")
            case ["release"]:
                self._ends_at = -math.inf
                self._remove()
            case _:
                self._say(f"failed the keeper does not know: {line[:_LONGEST_LINE]}")

    def tick(self, now: float) -> None:
        """Remove the address when its time is over; announce it, and listen to other machines that claim it."""
        claims = self._link.claims()
        if not self._is_held:
            return
        if now >= self._ends_at:
            self._remove()
            return
        if claims:
            self._say(f"claimed {claims[-1]}")
            if not self._has_lease:
                # Another gateway has the lease by now; two machines must not keep the address.
                self._remove()
                return
        if self._has_lease and now >= self._announce_at:
            self._announce(now)

    def close(self) -> None:
        """Remove the address if this keeper has it: another gateway of this machine may have a keeper of its own."""
        if self._is_held:
            self._remove()

    def _hold(self, now: float, seconds: float, *, has_lease: bool) -> None:
        seconds = min(seconds, _LONGEST_S)
        try:
            self._link.add(max(1, math.ceil(seconds)) + _RESERVE_S)
        except FloatingAddressError as error:
            self._say(f"failed {error}")
            return
        self._ends_at, self._has_lease = now + seconds, has_lease
        if not self._is_held:
            self._is_held, self._announced = True, 0
            self._announce(now)
            self._say("held")

    def _announce(self, now: float) -> None:
        self._link.announce()
        self._announced += 1
        is_first = self._announced < _FIRST_ANNOUNCEMENTS
        self._announce_at = now + (_FIRST_EVERY_S if is_first else _LATER_EVERY_S)

    def _remove(self) -> None:
        self._link.remove()
        if self._is_held:
            self._is_held = False
            self._say("released")


def keep(keeper: AddressKeeper, source: int, elapsed: Callable[[], float]) -> None:
    """Carry out the lines of a pipe until its end."""
    rest = b""
    try:
        while True:
            readable, _, _ = select.select([source], [], [], _TICK_S)
            if readable:
                data = os.read(source, _READ_BYTES)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    keeper.handle(line.decode(errors="replace"), elapsed())
                rest = rest[:_LONGEST_LINE]
            keeper.tick(elapsed())
    finally:
        keeper.close()


def main(address: str, interface: str) -> None:
    """Run the keeper of one address on one interface."""
    # Whoever ends the gateway's whole group must leave the keeper the time to remove the address.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    output: Final = sys.stdout.fileno()
    # A gateway that hangs reads nothing, and the keeper must go on.
    os.set_blocking(output, False)

    def say(text: str) -> None:
        try:
            os.write(output, f"{text}\n".encode())
        except OSError:  # the gateway is gone; the end of the input follows
            return

    try:
        wanted = parse_address(address)
        link = open_link(wanted, find_interface(wanted, interface))
    except FloatingAddressError as error:
        say(f"failed {error}")
        return
    keep(AddressKeeper(link, say), sys.stdin.fileno(), SystemClock().elapsed)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
