"""The network link of a floating address: adds and removes it, announces it, and hears other machines that claim it.

macOS's adapter follows ifconfig(8) and bpf(4), and has not run on a Mac yet.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Final, Protocol

from gateway.floating_address import arp, interfaces
from gateway.floating_address.interfaces import FloatingAddressError, NetworkInterface
from machinery import macos_commands

_COMMAND_S = 5.0
_FOLDERS = os.pathsep.join(("/usr/sbin", "/sbin", "/usr/bin", "/bin"))
_FRAMES_AT_ONCE = 64
_FRAME_BYTES = 2048
# linux/capability.h
_CAP_NET_ADMIN, _CAP_NET_RAW = 12, 13
# net/bpf.h of macOS
_BIOCGBLEN, _BIOCSETIF, _BIOCIMMEDIATE, _BIOCSHDRCMPLT = (
    0x40044266,
    0x8020426C,
    0x80044270,
    0x80044275,
)
_BPF_DEVICES = 256
IS_LINUX: Final[bool] = sys.platform == "linux"


class AddressLink(Protocol):
    """Actions of a keeper on the network. Methods raise FloatingAddressError."""

    def add(self, lifetime_s: int) -> None:
        """Add the address, or renew it; where the system can, it removes the address after `lifetime_s` by itself."""
        ...

    def remove(self) -> None:
        """Remove the address if it is there."""
        ...

    def announce(self) -> None:
        """Tell the network that this machine has the address."""
        ...

    def claims(self) -> list[str]:
        """Return the Ethernet addresses of other machines that claimed the address since the last call."""
        ...


def missing_capabilities(status: str) -> list[str]:
    """Return the capabilities that a process with this /proc/PID/status lacks. Pure."""
    (effective,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    wanted = (("CAP_NET_ADMIN", _CAP_NET_ADMIN), ("CAP_NET_RAW", _CAP_NET_RAW))
    return [name for name, bit in wanted if not int(effective, 16) >> bit & 1]


def check_rights() -> None:
    """Refuse a process that may not change addresses. Raises FloatingAddressError."""
    if not IS_LINUX:
        if os.geteuid() != 0:
            raise FloatingAddressError(
                "changing addresses of this machine needs root; start the gateway as root, or give clients several addresses "
                "instead (docs/operations/gateway.md, Several gateways)"
            )
        return
    missing = missing_capabilities(Path("/proc/self/status").read_text(encoding="utf-8"))
    if missing:
        raise FloatingAddressError(
            f"changing addresses of this machine needs {' and '.join(missing)}; with systemd give the unit "
            "AmbientCapabilities=CAP_NET_ADMIN CAP_NET_RAW, or give clients several addresses instead "
            "(docs/operations/gateway.md, Several gateways)"
        )


def find_interface(address: IPv4Interface, name: str) -> NetworkInterface:
    """Return the interface for the address. Raises FloatingAddressError."""
    try:
        known = interfaces.list_interfaces()
    except (OSError, ValueError) as error:
        raise FloatingAddressError(
            f"the list of network interfaces is not readable: {error}"
        ) from error
    return interfaces.choose_interface(known, address, name)


def open_link(address: IPv4Interface, interface: NetworkInterface) -> AddressLink:
    """Return the link of this system. Raises FloatingAddressError."""
    try:
        return LinuxLink(address, interface) if IS_LINUX else MacLink(address, interface)
    except OSError as error:
        raise FloatingAddressError(f"{interface.name}: {error.strerror or error}") from error


class LinuxLink:
    """iproute2, and a packet socket for ARP. The kernel removes an address that is not renewed."""

    def __init__(self, address: IPv4Interface, interface: NetworkInterface) -> None:
        self._address, self._interface = address, interface
        raw, protocol = socket.SOCK_RAW, socket.htons(arp.ETHERTYPE)
        self._socket = socket.socket(getattr(socket, "AF_PACKET", 17), raw, protocol)
        self._socket.settimeout(0)
        self._socket.bind((interface.name, arp.ETHERTYPE))

    def add(self, lifetime_s: int) -> None:
        # The kernel removes the address at the end of its lifetime.
        life = ("valid_lft", str(lifetime_s), "preferred_lft", str(lifetime_s))
        where = (str(self._address), "dev", self._interface.name)
        _run(("ip", "address", "replace", *where, *life, "noprefixroute"))

    def remove(self) -> None:
        with contextlib.suppress(FloatingAddressError):  # it is not there
            where = (str(self._address), "dev", self._interface.name)
            _run(("ip", "address", "delete", *where))

    def announce(self) -> None:
        for frame in arp.announcements(self._address.ip, self._interface.mac):
            with contextlib.suppress(OSError):  # the cable may be out
                self._socket.send(frame)

    def claims(self) -> list[str]:
        found = []
        with contextlib.suppress(OSError):  # no more frames
            for _ in range(_FRAMES_AT_ONCE):
                frame = self._socket.recv(_FRAME_BYTES)
                found.append(arp.claimant(frame, self._address.ip, self._interface.mac))
        return [one for one in found if one]


class MacLink:
    """ifconfig, and a packet filter device for ARP."""

    def __init__(self, address: IPv4Interface, interface: NetworkInterface) -> None:
        self._address, self._interface = address, interface
        self._device = _open_bpf()
        fcntl.ioctl(self._device, _BIOCIMMEDIATE, struct.pack("I", 1))
        # Frames carry our own Ethernet address already.
        fcntl.ioctl(self._device, _BIOCSHDRCMPLT, struct.pack("I", 1))
        fcntl.ioctl(self._device, _BIOCSETIF, struct.pack("16s16x", interface.name.encode()))
        (self._buffer_bytes,) = struct.unpack(
            "I", fcntl.ioctl(self._device, _BIOCGBLEN, struct.pack("I", 0))
        )
        os.set_blocking(self._device, False)

    def add(self, lifetime_s: int) -> None:
        del lifetime_s  # IPv4 addresses of macOS have none: the keeper removes them
        # A second address of a network has the mask of one host (ifconfig(8)).
        self._change(macos_commands.ADDRESS_ADD)

    def remove(self) -> None:
        with contextlib.suppress(FloatingAddressError):  # it is not there
            self._change(macos_commands.ADDRESS_REMOVE)

    def _change(self, command: macos_commands.MacCommand) -> None:
        _run(command.words(interface=self._interface.name, address=str(self._address.ip)))

    def announce(self) -> None:
        for frame in arp.announcements(self._address.ip, self._interface.mac):
            with contextlib.suppress(OSError):
                os.write(self._device, frame)

    def claims(self) -> list[str]:
        found: list[str] = []
        with contextlib.suppress(OSError):  # nothing to read
            buffer = os.read(self._device, self._buffer_bytes)
            found += [
                arp.claimant(frame, self._address.ip, self._interface.mac)
                for frame in arp.bpf_frames(buffer)
            ]
        return [one for one in found if one]


def _open_bpf() -> int:
    """Open the first free packet filter device. Raises OSError."""
    last: OSError | None = None
    for number in range(_BPF_DEVICES):
        try:
            return os.open(f"/dev/bpf{number}", os.O_RDWR)
        except OSError as error:  # in use, or the last one is passed
            last = error
            if isinstance(error, FileNotFoundError):
                break
    raise last or FileNotFoundError("/dev/bpf0")


def _run(command: tuple[str, ...]) -> str:
    """Run a command of the system and return its output. Raises FloatingAddressError."""
    program = shutil.which(command[0], path=_FOLDERS)
    if program is None:
        raise FloatingAddressError(
            f"the program {command[0]} is missing; install it (Linux: iproute2)"
        )
    try:
        done = subprocess.run(
            (program, *command[1:]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise FloatingAddressError(f"`{' '.join(command)}` failed: {error}") from error
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip()[:300] or f"exit code {done.returncode}"
        raise FloatingAddressError(f"`{' '.join(command)}` failed: {why}")
    return done.stdout.decode(errors="replace")
