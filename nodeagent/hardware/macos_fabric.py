"""Cables, addresses and RDMA devices of a Mac, from macOS commands. Parsing is pure; only `read_fabric` runs commands.

Tested on captures only, not on a Mac: tests/nodeagent/hardware/captures/fabric holds output that others published.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from machinery import macos_commands
from machinery.network_interfaces import parse_hardware_ports
from nodeagent.hardware import system_text
from nodeagent.hardware.system_text import parse_pairs, parse_positive
from schemas import chips
from schemas.node import FabricInterface, NodeFabric, RdmaDevice, ThunderboltPort

_CHIP: Final = "machdep.cpu.brand_string"
# A port reports its maximum, "Up to 120 Gb/s", or the speed of its cable, "80 Gb/s". Only Thunderbolt 5 reaches 80.
_SPEED: Final = re.compile(r"(?:Up to )?(\d{1,4}) Gb/s", re.ASCII)
# Names of the hardware port in networksetup: of today, and of older systems.
_WIRELESS_PORTS: Final = frozenset({"Wi-Fi", "AirPort"})
_TB5_GBPS: Final = 80
_TB4_GBPS: Final = 40
# The medium in ifconfig: "autoselect (1000baseT <full-duplex>)", "10Gbase-T"; Wi-Fi and Thunderbolt have no number.
_MEDIA: Final = re.compile(r"\s+media: .*?\b(\d{1,5})(G?)base", re.ASCII | re.IGNORECASE)
_STATES: Final = {"PORT_ACTIVE": "Active", "PORT_DOWN": "Down"}


class FabricOutput(NamedTuple):
    """Outputs of the commands; "" for each one that failed or timed out."""

    thunderbolt: str = ""
    hardware_ports: str = ""
    ifconfig: str = ""
    rdma_ctl: str = ""
    ibv_devinfo: str = ""
    sysctl: str = ""
    sw_vers: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceConfig:
    """The addresses, speeds and bridge members in `ifconfig`."""

    addresses: tuple[tuple[str, str, int], ...] = ()
    """(interface, IPv4 address, bits of its network or 0), without loopback."""
    bridged: frozenset[str] = frozenset()
    """Interfaces in a bridge that is up; `mlx.distributed_config` takes such a bridge down and keeps its members."""
    hardware_addresses: Mapping[str, str] = field(default_factory=dict)
    speeds: Mapping[str, int] = field(default_factory=dict)
    """Megabits a second by interface, where the medium tells."""


def parse_rdma_ctl(text: str) -> bool | None:
    """Parse `rdma_ctl status`, one word. Its exit code is 0 also for "needs to be executed from Recovery OS"."""
    return {"enabled": True, "disabled": False}.get(text.strip().lower())


def parse_devices(ibv_devinfo: str) -> tuple[RdmaDevice, ...]:
    """Parse `ibv_devinfo`: a stanza for each device, with one port. "No IB devices found" has none."""
    rdma_devices: list[RdmaDevice] = []
    for stanza in re.split(r"^\s*hca_id:", ibv_devinfo, flags=re.MULTILINE)[1:]:
        name = (stanza.split() or [""])[0]
        state = re.search(r"^\s*state:\s*(PORT_[A-Z_]+)", stanza, re.ASCII | re.MULTILINE)
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,32}", name, re.ASCII):
            continue
        word = _STATES.get(state[1], "Unknown") if state else "Unknown"
        # macOS names the device after the interface of the same port.
        interface = name.removeprefix("rdma_") if name.startswith("rdma_") else ""
        rdma_devices.append(
            RdmaDevice.model_validate({"name": name, "interface": interface, "state": word})
        )
    return tuple(rdma_devices)


def parse_ifconfig(text: str) -> InterfaceConfig:
    """Parse `ifconfig`: the address and speed of each interface, and the members of bridges."""
    addresses: list[tuple[str, str, int]] = []
    bridged: set[str] = set()
    hardware_addresses: dict[str, str] = {}
    speeds: dict[str, int] = {}
    name, is_up = "", False
    for line in text.splitlines():
        head = re.match(r"([A-Za-z0-9.]+): flags=[0-9a-f]+<([A-Z0-9,]*)>", line, re.ASCII)
        if head:
            flags = head[2].split(",")
            name, is_up = "" if "LOOPBACK" in flags else head[1], "UP" in flags
        if not name:
            continue
        inet = re.match(r"\s+inet (\d{1,3}(?:\.\d{1,3}){3})\b", line, re.ASCII)
        if inet:
            mask = re.search(r" netmask (0x[0-9a-f]{8})\b", line, re.ASCII)
            bits = system_text.parse_netmask(mask[1]) if mask else 0
            addresses.append((name, inet[1], bits))
        ether = re.match(r"\s+ether ([0-9a-f]{2}(?::[0-9a-f]{2}){5})\b", line, re.ASCII)
        if ether:
            hardware_addresses[name] = ether[1]
        member = re.match(r"\s+member: (\S+) flags=", line, re.ASCII)
        if member and is_up and name.startswith("bridge"):
            bridged.add(member[1])
        medium = _MEDIA.match(line)
        if medium:
            speeds[name] = int(medium[1]) * (1000 if medium[2] else 1)
    return InterfaceConfig(
        addresses=tuple(addresses),
        bridged=frozenset(bridged),
        hardware_addresses=hardware_addresses,
        speeds=speeds,
    )


def parse_ports(
    profiler: str, names: Mapping[str, str], bridged: frozenset[str]
) -> tuple[ThunderboltPort, ...]:
    """Parse `system_profiler SPThunderboltDataType -json`: a bus is a port; `names` as from parse_hardware_ports.

    A Mac at the other end is an item of the bus itself, with its own domain. A Mac behind a dock is an item of the
    dock and not a peer: RDMA does not pass a dock.
    """
    thunderbolt_ports: list[ThunderboltPort] = []
    for bus in _buses(profiler):
        tag = bus.get("receptacle_1_tag")
        socket = tag if isinstance(tag, dict) else {}
        number, domain = (
            _text_field(socket, "receptacle_id_key"),
            _text_field(bus, "domain_uuid_key").upper(),
        )
        if not number and not domain:
            continue
        interface = names.get(f"Thunderbolt {number}", "")
        speed = _text_field(socket, "current_speed_key")
        peers = (_text_field(item, "domain_uuid_key").upper() for item in _dicts(bus.get("_items")))
        is_used = _text_field(socket, "receptacle_status_key") == "receptacle_connected"
        thunderbolt_ports.append(
            ThunderboltPort(
                receptacle=number,
                interface=interface,
                domain=domain,
                peer=next(filter(None, peers), ""),
                speed_gbps=_gbps(speed) if is_used and not speed.startswith("Up to") else 0,
                is_bridged=interface in bridged,
            )
        )
    return tuple(
        sorted(
            thunderbolt_ports, key=lambda port: (parse_positive(port.receptacle) or 0, port.domain)
        )
    )


def parse_thunderbolt(sysctl: str, profiler: str) -> int:
    """Return the newest Thunderbolt generation by the chip, or for an unknown chip by the ports' speed; 0 if unknown."""
    chip = chips.find_chip(parse_pairs(sysctl).get(_CHIP, ""), gpu_cores=None, memory_bytes=None)
    if chip is not None:
        return max(int(word) for word in chip.thunderbolt.split() if word.isdecimal())
    tags = [bus.get("receptacle_1_tag") for bus in _buses(profiler)]
    fastest = max(
        (_gbps(_text_field(tag, "current_speed_key")) for tag in tags if isinstance(tag, dict)),
        default=0,
    )
    if fastest >= _TB5_GBPS:
        return 5
    return 4 if fastest >= _TB4_GBPS else 0


def assemble_fabric(printed: FabricOutput) -> NodeFabric:
    """Return the fabric from the outputs."""
    names = parse_hardware_ports(printed.hardware_ports)
    ifconfig = parse_ifconfig(printed.ifconfig)
    over_thunderbolt = {device for port, device in names.items() if port.startswith("Thunderbolt")}
    wireless = {device for port, device in names.items() if port in _WIRELESS_PORTS}
    return NodeFabric(
        interfaces=tuple(
            FabricInterface(
                name=name,
                address=address,
                is_thunderbolt=name in over_thunderbolt,
                prefix_length=bits,
                hardware_address=ifconfig.hardware_addresses.get(name, ""),
                is_wireless=name in wireless,
                speed_mbps=ifconfig.speeds.get(name, 0),
            )
            for name, address, bits in ifconfig.addresses
        ),
        ports=parse_ports(printed.thunderbolt, names, ifconfig.bridged),
        rdma=parse_devices(printed.ibv_devinfo),
        is_rdma_enabled=parse_rdma_ctl(printed.rdma_ctl),
        thunderbolt=parse_thunderbolt(printed.sysctl, printed.thunderbolt),
        os_build=printed.sw_vers.strip(),
    )


def _buses(profiler: str) -> list[dict[str, object]]:
    try:
        tree: object = json.loads(profiler)
    except ValueError:
        return []
    return _dicts(tree.get("SPThunderboltDataType")) if isinstance(tree, dict) else []


def _dicts(found: object) -> list[dict[str, object]]:
    entries: Iterable[object] = found if isinstance(found, list) else ()
    return [entry for entry in entries if isinstance(entry, dict)]


def _text_field(tree: Mapping[str, object], key: str) -> str:
    found = tree.get(key)
    return found if isinstance(found, str) else ""


def _gbps(speed: str) -> int:
    match = _SPEED.match(speed)
    return int(match[1]) if match else 0


async def read_fabric() -> NodeFabric | None:
    """Run the commands concurrently, each with its own timeout, and return the fabric.

    Returns None if a command that every Mac has failed: a partial result would look like unplugged cables.
    """
    commands = (
        macos_commands.THUNDERBOLT,
        macos_commands.HARDWARE_PORTS,
        macos_commands.INTERFACES,
        macos_commands.RDMA_STATUS,
        macos_commands.RDMA_DEVICES,
        macos_commands.CHIP_SYSCTL,
        macos_commands.BUILD,
    )
    printed = FabricOutput(*await system_text.command_texts(commands))
    if not (
        printed.thunderbolt and printed.hardware_ports and printed.ifconfig and printed.sw_vers
    ):
        return None
    return assemble_fabric(printed)
