"""Network namespaces for the members of a cluster, so that a member can be cut off for real.

Each member lives in a namespace with two legs: one in the network of the members, one in the
network of the clients, which is ours too. Either leg can be taken away; packets then vanish without
a word. Needs root on Linux; `available()` tells. Everything made here bears our process id.
"""

import asyncio
import ctypes
import os
import random
import re
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tests.support.cluster import Place

T = TypeVar("T")
# CLONE_NEWNET of unshare(2).
_NEW_NETWORK = 0x40000000


class NoNamespaceError(Exception):
    """The machine does not let us make namespaces or links."""


def _ip(*lines: str) -> None:
    """Run commands of `ip`, one after the other."""
    try:
        done = subprocess.run(
            ("ip", "-batch", "-"),
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoNamespaceError(str(error)) from error
    if done.returncode:
        raise NoNamespaceError(done.stderr.strip())


def available() -> bool:
    """Return whether networks can be made here, by making one."""
    try:
        with Networks(1).made():
            return True
    except NoNamespaceError:
        return False


class Networks:
    """The two networks of a cluster, while `made()` lasts."""

    def __init__(self, members: int) -> None:
        self._members = range(members)
        # Names of interfaces have 15 characters at most.
        self._own = f"mf{os.getpid() % 1_000_000:x}"
        # For tests of networks, RFC 2544; nobody routes it.
        self._net = f"198.18.{random.randrange(256)}", f"198.19.{random.randrange(256)}"

    def _namespace(self, member: int) -> str:
        return f"{self._own}-{member}"

    def _link(self, leg: str, member: int) -> str:
        return f"{self._own}{leg}{member}"

    def place(self, member: int) -> Place:
        """Return where the member lives."""
        return Place(
            client_host=f"{self._net[0]}.{member + 2}",
            peer_host=f"{self._net[1]}.{member + 2}",
            prefix=("ip", "netns", "exec", self._namespace(member)),
        )

    @contextmanager
    def made(self) -> Iterator["Networks"]:
        try:
            self._make()
            yield self
        finally:
            self._remove()

    def _make(self) -> None:
        for leg in ("c", "p"):
            bridge = f"{self._own}{leg}b"
            _ip(f"link add {bridge} type bridge", f"link set {bridge} up")
        _ip(f"addr add {self._net[0]}.1/24 dev {self._own}cb")
        for member in self._members:
            space = self._namespace(member)
            _ip(f"netns add {space}")
            for number, leg in enumerate(("c", "p")):
                link = self._link(leg, member)
                _ip(
                    f"link add {link} type veth peer name {leg}0 netns {space}",
                    f"link set {link} master {self._own}{leg}b up",
                )
                _inside(space, f"addr add {self._net[number]}.{member + 2}/24 dev {leg}0")
                _inside(space, f"link set {leg}0 up")
            _inside(space, "link set lo up")

    def _remove(self) -> None:
        for member in self._members:
            with suppress(NoNamespaceError):
                _ip(f"netns del {self._namespace(member)}")  # its links go with it
        for leg in ("c", "p"):
            with suppress(NoNamespaceError):
                _ip(f"link del {self._own}{leg}b")

    def join_peers(self) -> str:
        """Give ourselves an address in the network of the members, too; return it."""
        address = f"{self._net[1]}.1"
        _ip(f"addr add {address}/24 dev {self._own}pb")
        return address

    def client_address(self, host: int) -> str:
        """Return an address of the network of the clients, which no member has of its own."""
        return f"{self._net[0]}.{host}"

    def cut_peers(self, member: int) -> None:
        """Take the member away from the other members; clients still reach it."""
        _ip(f"link set {self._link('p', member)} down")

    def mend_peers(self, member: int) -> None:
        _ip(f"link set {self._link('p', member)} up")

    def cut_clients(self, member: int) -> None:
        """Take the member away from its clients; the other members still reach it."""
        _ip(f"link set {self._link('c', member)} down")

    def mend_clients(self, member: int) -> None:
        _ip(f"link set {self._link('c', member)} up")

    def rename_peer_leg(self, member: int, name: str) -> None:
        """Give the member's interface in the network of the members another name, before it is used."""
        space = self._namespace(member)
        for line in ("p0 down", f"p0 name {name}", f"{name} up"):
            _inside(space, f"link set {line}")

    def peer_bytes(self, member: int) -> int:
        """Return the bytes that the member has sent into the network of the members."""
        link = Path("/sys/class/net", self._link("p", member))
        return int((link / "statistics" / "rx_bytes").read_text())

    def received_bytes(self, member: int) -> int:
        """Return the bytes that the member has got from the network of the members."""
        link = Path("/sys/class/net", self._link("p", member))
        return int((link / "statistics" / "tx_bytes").read_text())

    def limit_clients(self, bytes_per_s: int) -> None:
        """Limit what this machine sends to all members together: the link to the internet."""
        _limit((), f"{self._own}cb", bytes_per_s)

    def limit_peers(self, bytes_per_s: int) -> None:
        """Limit what each member sends to the others, and what it gets from them: the local network."""
        for member in self._members:
            _limit(("ip", "netns", "exec", self._namespace(member)), "p0", bytes_per_s)
            _limit((), self._link("p", member), bytes_per_s)

    @contextmanager
    def packet_loss(self, percent: int) -> Iterator[Callable[[], int]]:
        """Drop so many of the packets that members receive; the function returns the number of dropped ones.

        Done by nftables, because the kernel of a small virtual machine often has no netem.
        """
        rule = f"meta l4proto tcp numgen random mod 100 < {percent} counter drop"
        table = f"table inet {self._own} {{ chain i {{ type filter hook input priority 0; {rule}\n}}\n}}\n"
        for member in self._members:
            self._nft(member, table)
        try:
            yield lambda: sum(self._dropped(member) for member in self._members)
        finally:
            for member in self._members:
                self._nft(member, f"delete table inet {self._own}")

    def _dropped(self, member: int) -> int:
        found = re.search(
            r"counter packets (\d+)", self._nft(member, f"list table inet {self._own}")
        )
        assert found is not None
        return int(found[1])

    def _nft(self, member: int, text: str) -> str:
        done = subprocess.run(
            ("ip", "netns", "exec", self._namespace(member), "nft", "-f", "-"),
            input=text,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        if done.returncode:
            raise NoNamespaceError(done.stderr.strip())
        return done.stdout

    def drop_multicast(self) -> None:
        """Let the network of the clients carry no multicast between members, as some access points do."""
        for member in self._members:
            _ip(f"link set {self._link('c', member)} type bridge_slave mcast_flood off")


def _limit(prefix: tuple[str, ...], link: str, bytes_per_s: int) -> None:
    """Limit what leaves a link, with a queue of 50 ms."""
    words = (
        f"tc qdisc replace dev {link} root tbf rate {bytes_per_s * 8}bit burst 256kb latency 50ms"
    )
    done = subprocess.run(
        (*prefix, *words.split()), capture_output=True, text=True, timeout=10, check=False
    )
    if done.returncode:
        raise NoNamespaceError(done.stderr.strip())


def _inside(space: str, line: str) -> None:
    done = subprocess.run(
        ("ip", "-n", space, *line.split()), capture_output=True, text=True, timeout=10, check=False
    )
    if done.returncode:
        raise NoNamespaceError(done.stderr.strip())


def without_route(address: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the work in a network of its own, in which the address is EHOSTUNREACH and only loopback is up."""

    def run() -> T:
        # Of this thread only; its sockets and its children are in the new network.
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
            raise NoNamespaceError(os.strerror(ctypes.get_errno()))
        _ip("link set lo up", f"route add unreachable {address}")
        return asyncio.run(work())

    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(run).result(timeout=60)
