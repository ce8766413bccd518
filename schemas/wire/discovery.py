"""Announcements of a fleet's processes on the local network: the TXT record of `_mlx-fleet._tcp` (RFC 6763, section 6).

Every machine of the network reads them, and any can forge them. They hold nothing secret, and nothing about models or
memory. They choose addresses to try; TLS proves the server that answers there.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

SERVICE: Final = "_mlx-fleet._tcp.local."
VERSION: Final = 1
"""The version of the properties. Readers ignore announcements of other versions, and properties that they do not know."""
MAX_AUTHORITIES: Final = 3
NO_PORT: Final = 9
"""The port in the record of a machine that serves nothing: discard, which nothing dials."""

AnnouncedRole: TypeAlias = Literal["control", "gateway", "new"]
"""control: a join port. gateway: an endpoint for clients. new: a machine that waits for an approval."""

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", re.ASCII)
_FLEET: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_SHA256: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """The properties of a process."""

    role: AnnouncedRole
    name: str
    """The name of its machine, or of its identity."""
    fleet: str = ""
    """The uid of its fleet; empty if it has none, or no certificates."""
    authorities: tuple[str, ...] = ()
    """SHA-256 of the public keys of the fleet's authorities, in hexadecimal digits, as in join tokens."""
    is_tls: bool = True
    """False: it speaks plain HTTP."""


def render(announcement: Announcement) -> dict[str, str]:
    """Return the properties of an announcement."""
    found = {"v": str(VERSION), "role": announcement.role, "name": announcement.name}
    if announcement.fleet:
        found["fleet"] = announcement.fleet
    if announcement.authorities:
        found["ca"] = ",".join(announcement.authorities[:MAX_AUTHORITIES])
    if not announcement.is_tls:
        found["tls"] = "0"
    return found


def parse(properties: Mapping[str, str]) -> Announcement | None:
    """Return the announcement in properties from the network; None if they are of another version or malformed."""
    role, name = _role(properties.get("role", "")), properties.get("name", "")
    fleet, hashes = properties.get("fleet", ""), properties.get("ca", "")
    if properties.get("v") != str(VERSION) or role is None or not _NAME.fullmatch(name):
        return None
    authorities = tuple(hashes.split(",")) if hashes else ()
    if (fleet and not _FLEET.fullmatch(fleet)) or len(authorities) > MAX_AUTHORITIES:
        return None
    if not all(_SHA256.fullmatch(authority) for authority in authorities):
        return None
    if role == "control" and not (fleet and authorities):
        return None  # a join port always has both
    return Announcement(
        role=role,
        name=name,
        fleet=fleet,
        authorities=authorities,
        is_tls=properties.get("tls") != "0",
    )


def _role(text: str) -> AnnouncedRole | None:
    return next((one for one in get_args(AnnouncedRole) if one == text), None)
