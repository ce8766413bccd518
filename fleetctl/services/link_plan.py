"""The plan of `fleetctl fabric setup`: a network service and a /30 for each Thunderbolt port. Pure."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network
from typing import Final, assert_never

from fleetctl.services.changes import (
    BridgeChange,
    Change,
    NetworkChange,
    NetworkServiceChange,
    NetworkSwitchChange,
    key_of,
)
from machinery import macos_commands
from nodeagent.hardware.macos_network import MANUAL, NetworkService
from nodeagent.hardware.service_definitions import CABLES_JOB
from schemas.cable_address import cable_interface
from schemas.node import ThunderboltPort

PART: Final = CABLES_JOB
"""The name under which changes.json has the changes; also that of the job at boot."""
_PREFIX: Final = "mlx-fleet "
# As long as exo's script waits for macOS to set up its networks after a boot.
_BOOT_WAIT_S: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """The Thunderbolt ports of a Mac, and what holds them."""

    ports: tuple[ThunderboltPort, ...]
    services: tuple[NetworkService, ...]
    """Network services of Thunderbolt ports and bridges."""
    running: Mapping[str, tuple[str, ...]]
    """Members of the running bridges."""
    stored: Mapping[str, str]
    """Property lists with the settings of the stored bridges."""
    networks: tuple[tuple[str, IPv4Network], ...] = ()
    """(interface, network) of each address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CableLink:
    """A cable to another Mac, with the addresses of both ends."""

    port: ThunderboltPort
    here: IPv4Interface
    there: IPv4Interface


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """The changes that a Mac needs, in their order."""

    changes: tuple[Change, ...]
    links: tuple[CableLink, ...]
    notes: tuple[str, ...]
    """Ports that are left alone, and why."""


def plan_links(
    state: LinkState, recorded: Sequence[Change], *, salt: str | None, is_replacing: bool
) -> LinkPlan:
    """Return the changes that give each Thunderbolt port a service of its own, and each cable a network.

    `recorded` are the changes of earlier runs, which stay. `salt` None: that of earlier runs. Without `is_replacing`, an
    address that was set by hand stays, and so does the port that has it.
    """
    earlier = [change for change in recorded if isinstance(change, NetworkServiceChange)]
    if salt is None:
        salt = next((change.salt for change in earlier), "")
    devices = {port.interface: port for port in state.ports if port.interface}
    notes: list[str] = []
    bridges: list[BridgeChange] = []
    switched: list[NetworkSwitchChange] = []
    held_devices: dict[str, str] = {}
    """Devices that stay as they are, with the service that holds them."""
    for name, members in _thunderbolt_bridges(state, frozenset(devices)).items():
        others = [member for member in members if member not in devices]
        held = _set_by_hand(state, name, is_replacing=is_replacing)
        if others or held:
            why = f"it also has {', '.join(others)}" if others else held
            notes.append(f"{name} of {', '.join(members)} stays: {why}")
            held_devices |= dict.fromkeys(members, name)
            continue
        bridges.append(
            BridgeChange(
                name=name, members=state.running.get(name, ()), stored=state.stored.get(name, "")
            )
        )
        switched += _switches(state, name)
    services: list[NetworkServiceChange] = []
    links: list[CableLink] = []
    for device, port in devices.items():
        place = f"Thunderbolt {port.receptacle}"
        held = _set_by_hand(state, device, is_replacing=is_replacing)
        if held:
            notes.append(f"{place} ({device}) stays: {held}")
        if held or device in held_devices:
            continue
        link, note = _link(port, state, links, salt)
        notes += [f"{place} ({device}) gets no fixed address: {note}"] if note else []
        links += [link] if link is not None else []
        switched += _switches(state, device)
        address = "" if link is None else str(link.here)
        services.append(
            NetworkServiceChange(name=f"{_PREFIX}{place}", port=place, address=address, salt=salt)
        )
    before = [
        change for change in recorded if isinstance(change, BridgeChange | NetworkSwitchChange)
    ]
    # A service is switched off while its bridge is there, and switched on again once it is back.
    known = {key_of(change) for change in before}
    wanted: tuple[Change, ...] = (*switched, *bridges)
    fresh = [change for change in wanted if key_of(change) not in known]
    return LinkPlan(changes=(*before, *fresh, *services), links=tuple(links), notes=tuple(notes))


def sentence(change: NetworkChange) -> str:
    """Return one line about a change, for people."""
    match change:
        case BridgeChange(name=name, members=members):
            of = f" of {', '.join(members)}" if members else ""
            return f"dissolve the bridge {name}{of}"
        case NetworkServiceChange(name=name, port=port, address=address):
            how = f"the address {address}" if address else "no fixed address"
            return f"give {port} a network service of its own, {name}, with {how}"
        case NetworkSwitchChange(name=name):
            return f"switch off the network service {name}"
        case _:
            assert_never(change)


def boot_command(plan: LinkPlan) -> tuple[str, ...]:
    """Return the command that applies a plan again at boot: programs of macOS only, which no user can replace.

    Each step may fail: most have nothing to do.
    """
    steps = [macos_commands.SLEEP.argv(seconds=str(_BOOT_WAIT_S))]
    for change in plan.changes:
        match change:
            case BridgeChange(name=name):
                steps.append(macos_commands.BRIDGE_FORGET.argv(bridge=name))
                steps.append(macos_commands.BRIDGE_DESTROY.argv(bridge=name))
            case NetworkSwitchChange(name=name):
                steps.append(macos_commands.SERVICE_SWITCH.argv(service=name, state="off"))
            case NetworkServiceChange(name=name, address=address) if address:
                interface = IPv4Interface(address)
                mask = str(interface.netmask)
                steps.append(
                    macos_commands.SERVICE_ADDRESS.argv(
                        service=name, address=str(interface.ip), netmask=mask
                    )
                )
            case _:
                pass
    return ("/bin/sh", "-c", "\n".join(map(shlex.join, steps)))


def _thunderbolt_bridges(
    state: LinkState, devices: frozenset[str]
) -> Mapping[str, tuple[str, ...]]:
    """Return the running bridges that have a Thunderbolt port, and bridge0, of which only the settings may be left."""
    bridges = {
        name: members for name, members in state.running.items() if devices.intersection(members)
    }
    for name in state.stored:
        if name == "bridge0":
            bridges.setdefault(name, state.running.get(name, ()))
    return bridges


def _set_by_hand(state: LinkState, device: str, *, is_replacing: bool) -> str:
    """Return why a device is left alone: a foreign service gives it an address by hand; empty if none does."""
    for service in _foreign(state, device):
        if service.method == MANUAL and not is_replacing:
            return (
                f'its network service "{service.name}" has the address {service.address} by hand. '
                "--replace switches that service off, until --undo"
            )
    return ""


def _foreign(state: LinkState, device: str) -> Iterator[NetworkService]:
    for service in state.services:
        is_ours = service.name.startswith(_PREFIX)
        if service.device == device and service.is_enabled and not is_ours:
            yield service


def _switches(state: LinkState, device: str) -> list[NetworkSwitchChange]:
    return [NetworkSwitchChange(name=service.name) for service in _foreign(state, device)]


def _link(
    port: ThunderboltPort, state: LinkState, links: Sequence[CableLink], salt: str
) -> tuple[CableLink | None, str]:
    """Return the link of a port, or why it has none; (None, "") if no cable leads to a Mac."""
    if not port.peer:
        return None, ""
    if port.peer in {other.domain for other in state.ports}:
        return None, "its cable leads to this Mac itself"
    try:
        here = cable_interface(port.domain, port.peer, salt=salt)
        there = cable_interface(port.peer, port.domain, salt=salt)
    except ValueError:
        return None, "system_profiler does not tell its UUID"
    cables = {other.interface for other in state.ports}
    taken = [(link.port.interface, link.here.network) for link in links]
    taken += [(name, network) for name, network in state.networks if name not in cables]
    for name, network in taken:
        if network.overlaps(here.network):
            return None, (
                f"{name} is in the network {network} already. Run `sudo fleetctl fabric setup --salt WORD` on this Mac and "
                "on all Macs with a cable to it, with one word"
            )
    return CableLink(port=port, here=here, there=there), ""
