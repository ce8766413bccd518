"""Network services and stored bridges of macOS, as networksetup and PlistBuddy print them. Pure.

Tested on outputs in the published formats only, not on a Mac.
"""

import plistlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from xml.parsers.expat import ExpatError

from nodeagent.hardware.system_text import parse_pairs

MANUAL: Final = "Manual"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkService:
    """A network service of the current location."""

    name: str
    port: str
    """Hardware port, such as "Thunderbolt 2"."""
    device: str
    is_enabled: bool = True
    method: str = ""
    """The first word of its configuration: Manual, DHCP; empty if it is not known."""
    address: str = ""
    netmask: str = ""


def parse_service_order(text: str) -> tuple[NetworkService, ...]:
    """Return the services in `networksetup -listnetworkserviceorder`; `(*)` in place of a number is a disabled one."""
    pattern = r"^\((\*?\d*)\) (.+)\n\(Hardware Port: (.*), Device: (.*)\)$"
    return tuple(
        NetworkService(name=name, port=port, device=device, is_enabled="*" not in number)
        for number, name, port, device in re.findall(pattern, text, re.MULTILINE)
    )


def with_info(service: NetworkService, text: str) -> NetworkService:
    """Return the service with the configuration in `networksetup -getinfo`."""
    method = re.match(r"(\w+) Configuration$", text, re.MULTILINE)
    pairs = parse_pairs(text)
    return replace(
        service,
        method=method[1] if method else "",
        address=pairs.get("IP address", ""),
        netmask=pairs.get("Subnet mask", ""),
    )


def parse_running_bridges(ifconfig: str) -> Mapping[str, tuple[str, ...]]:
    """Return the members of each bridge in `ifconfig`, also of one that is down."""
    bridges: dict[str, tuple[str, ...]] = {}
    name = ""
    for line in ifconfig.splitlines():
        if head := re.match(r"([A-Za-z0-9.]+): flags=", line, re.ASCII):
            name = head[1]
            if name.startswith("bridge"):
                bridges[name] = ()
        elif name in bridges and (
            member := re.match(r"\s+member: ([A-Za-z0-9.]+) ", line, re.ASCII)
        ):
            bridges[name] += (member[1],)
    return bridges


def parse_stored_bridges(xml: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the bridges in `PlistBuddy -x -c "Print :VirtualNetworkInterfaces:Bridge"`; none for another output."""
    try:
        tree = plistlib.loads(xml.encode())
    except (plistlib.InvalidFileException, ExpatError, ValueError):
        return {}
    entries = tree.items() if isinstance(tree, dict) else ()
    return {str(name): entry for name, entry in entries if isinstance(entry, dict)}
