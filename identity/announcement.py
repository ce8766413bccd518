"""Announcement of this process on the local network, so that new machines and clients find its fleet.

It says nothing that a connection to the process would not say: its fleet, and the hashes of its authorities.
"""

import asyncio
import contextlib
import functools
import importlib
import logging
import re
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from identity.authority import AuthorityError, load_authorities, spki_hash
from identity.credentials import Credentials
from identity.folder import FolderError
from machinery.clock import Clock
from machinery.connection_limits import is_loopback
from machinery.options import Option, options
from schemas.wire.discovery import MAX_AUTHORITIES, SERVICE, AnnouncedRole, Announcement, render

log = logging.getLogger(__name__)

_MAX_NAME: Final = 40


announce_option: Final = options(
    "FLEET",
    Option(
        "--no-announce",
        "Do not announce this process on the local network (mDNS, _mlx-fleet._tcp). Processes that listen on "
        "loopback alone are never announced.",
        is_flag=True,
    ),
)
"""Adds --no-announce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """The role of a process, and where it listens, as they are announced."""

    role: AnnouncedRole
    host: str
    """An IP address or a name; an unspecified address, or an empty text, stands for all of this machine."""
    port: int
    is_tls: bool = True
    name: str = ""
    """The name of its machine; empty for its host name."""

    @property
    def is_reachable(self) -> bool:
        """True if other machines may connect."""
        found = self.addresses
        return not found or not all(map(is_loopback, found))

    @property
    def addresses(self) -> tuple[str, ...]:
        """The IP addresses; () for all of this machine."""
        found: list[str] = []
        with contextlib.suppress(OSError):
            kind = socket.SOCK_STREAM
            answers = socket.getaddrinfo(self.host, 0, type=kind) if self.host else ()
            found = [str(answer[4][0]) for answer in answers]
        is_any = any(one in ("0.0.0.0", "::") for one in found)  # noqa: S104 - compared with
        return () if is_any else tuple(dict.fromkeys(found))


def machine_name(text: str) -> str:
    """Return a name for announcements made of a host name."""
    found = re.sub(r"[^a-z0-9-]+", "-", text.partition(".")[0].lower())[:_MAX_NAME].strip("-")
    return found or "mac"


@contextlib.asynccontextmanager
async def announced(
    listener: Listener | None, own: Credentials | None, clock: Clock
) -> AsyncIterator[None]:
    """Announce a process while the block runs; None: nothing is announced."""
    if listener is None or not listener.is_reachable:
        yield
        return
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(announce(listener, own, clock), name="announcement")
            try:
                yield
            finally:
                task.cancel()
    except BaseExceptionGroup as failed:  # as without an announcement
        raise failed.exceptions[0] from None


async def announce(listener: Listener, own: Credentials | None, clock: Clock) -> None:
    """Announce a process that listens, for ever; its authorities are read again every ten seconds."""
    # In a thread: the import takes 170 ms, in which the process already serves.
    mdns = await asyncio.to_thread(importlib.import_module, "machinery.mdns")
    name = machine_name(listener.name or socket.gethostname())
    addresses = listener.addresses

    def service() -> Any:
        found = Announcement(
            role=listener.role,
            name=name,
            fleet="" if own is None else own.identity.fleet,
            authorities=() if own is None else _authorities(own),
            is_tls=listener.is_tls,
        )
        return mdns.Service(
            name=f"{name}-{listener.role}",
            port=listener.port,
            properties=render(found),
            addresses=addresses,
        )

    await mdns.Announcer(SERVICE, service, clock).run()


def _authorities(own: Credentials) -> tuple[str, ...]:
    """Return the hashes of the authorities that the process trusts; the first one signs."""
    try:
        return _hashes(own.folder.read_authorities())
    except (FolderError, AuthorityError) as error:
        log.warning("announcement without authorities", extra={"why": str(error)})
        return ()


@functools.lru_cache(maxsize=4)
def _hashes(pem: str) -> tuple[str, ...]:
    certificates = load_authorities(pem)[:MAX_AUTHORITIES]
    return tuple(spki_hash(certificate.public_key()).hex() for certificate in certificates)
