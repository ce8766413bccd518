"""Network services and bridges of Thunderbolt ports: observed, changed and changed back.

The commands are those of public tools (exo's NetworkSetupHelper, MLX's IPConfigurator). They have not run on hardware here:
docs/hardware.md has the check-list for the first Mac.
"""

import plistlib
import tempfile
from ipaddress import IPv4Interface
from pathlib import Path
from typing import assert_never

from fleetctl.services import commands
from fleetctl.services.changes import (
    BridgeChange,
    NetworkChange,
    NetworkServiceChange,
    NetworkSwitchChange,
)
from fleetctl.services.link_plan import LinkState
from fleetctl.services.port import ServiceError
from machinery import macos_commands
from machinery.macos_commands import MacCommand
from machinery.network_interfaces import parse_hardware_ports, thunderbolt_devices
from nodeagent.hardware import macos_fabric, macos_network
from nodeagent.hardware.macos_network import MANUAL, NetworkService


async def read_state() -> LinkState:
    """Return the Thunderbolt ports of this Mac, and the services and bridges that hold them.

    Raises:
        ServiceError: a command is missing, or does not print what it should.

    """
    hardware = parse_hardware_ports(await _read(macos_commands.HARDWARE_PORTS))
    ifconfig = await _read(macos_commands.INTERFACES)
    interfaces = macos_fabric.parse_ifconfig(ifconfig)
    running = macos_network.parse_running_bridges(ifconfig)
    devices = thunderbolt_devices(hardware)
    profiler = await _read(macos_commands.THUNDERBOLT)
    ports = macos_fabric.parse_ports(profiler, hardware, interfaces.bridged)
    if devices - running.keys() and not ports:
        raise ServiceError(
            "system_profiler lists no Thunderbolt port, though networksetup does; try again, and see "
            "`system_profiler SPThunderboltDataType -json`"
        )
    return LinkState(
        ports=ports,
        services=tuple(
            [
                macos_network.with_info(service, await _info(service.name))
                for service in await _services()
                if service.device in devices | running.keys()
            ]
        ),
        running=running,
        stored=await _stored(),
        networks=tuple(
            (name, IPv4Interface(f"{address}/{bits}").network)
            for name, address, bits in interfaces.addresses
            if bits
        ),
    )


async def with_old(change: NetworkChange) -> NetworkChange | None:
    """Return the change with what is there before it; None if it is not necessary."""
    match change:
        case BridgeChange():
            running, stored = await _running(), await _stored()
            is_there = change.name in running or change.name in stored
            return change if is_there else None
        case NetworkServiceChange():
            return None if _is_as_wanted(await _service(change.name), change) else change
        case NetworkSwitchChange():
            service = await _service(change.name)
            return change if service is not None and service.is_enabled else None
        case _:
            assert_never(change)


async def make(change: NetworkChange) -> None:
    """Make a change; it may be made already, or in part. Raises ServiceError if macOS refuses it."""
    match change:
        case BridgeChange(name=name):
            # Stored settings first: a running bridge of which nothing is stored ends with the next restart.
            if name in await _stored():
                await _change(macos_commands.BRIDGE_FORGET, bridge=name)
            running = await _running()
            for member in running.get(name, ()):
                await _change(macos_commands.BRIDGE_REMOVE, bridge=name, interface=member)
            if name in running:
                await _change(macos_commands.BRIDGE_DESTROY, bridge=name)
        case NetworkServiceChange():
            await _make_service(change)
        case NetworkSwitchChange(name=name):
            service = await _service(name)
            if service is not None and service.is_enabled:
                await _change(macos_commands.SERVICE_SWITCH, service=name, state="off")
        case _:
            assert_never(change)


async def undo(change: NetworkChange) -> str:
    """Undo a change, made or not; return a sentence if something stays. Raises ServiceError if macOS refuses it."""
    match change:
        case BridgeChange(name=name):
            if change.stored and name not in await _stored():
                # It fails if the dictionary of bridges is there.
                await commands.run(*macos_commands.BRIDGES_ADD.words())
                with tempfile.TemporaryDirectory(prefix="mlx-fleet-") as folder:
                    path = Path(folder) / "bridge.plist"
                    path.write_text(change.stored)
                    await _change(macos_commands.BRIDGE_STORE, path=str(path))
            if not change.members:
                return ""
            running = await _running()
            if name not in running:
                await _change(macos_commands.BRIDGE_CREATE, bridge=name)
            for member in change.members:
                if member not in running.get(name, ()):
                    await _change(macos_commands.BRIDGE_ADD, bridge=name, interface=member)
            await _change(macos_commands.BRIDGE_UP, bridge=name)
        case NetworkServiceChange(name=name):
            if await _service(name) is not None:
                await _change(macos_commands.SERVICE_DELETE, service=name)
        case NetworkSwitchChange(name=name):
            service = await _service(name)
            if service is None:
                return f"the network service {name} is gone: somebody else deleted it"
            if not service.is_enabled:
                await _change(macos_commands.SERVICE_SWITCH, service=name, state="on")
        case _:
            assert_never(change)
    return ""


async def _make_service(change: NetworkServiceChange) -> None:
    name, service = change.name, await _service(change.name)
    if _is_as_wanted(service, change):
        return
    if service is None:
        await _change(macos_commands.SERVICE_CREATE, service=name, port=change.port)
    elif not service.is_enabled:
        await _change(macos_commands.SERVICE_SWITCH, service=name, state="on")
    if change.address:
        interface = IPv4Interface(change.address)
        address, netmask = str(interface.ip), str(interface.netmask)
        await _change(
            macos_commands.SERVICE_ADDRESS, service=name, address=address, netmask=netmask
        )
    elif service is not None:  # a new one asks for an address by DHCP
        await _change(macos_commands.SERVICE_DHCP, service=name)
    # networksetup prints some refusals and answers 0.
    if not _is_as_wanted(await _service(name), change):
        raise ServiceError(
            f"macOS did not give the network service {name} the address {change.address or 'by DHCP'}; see "
            f"`networksetup -getinfo '{name}'`. A profile of an administrator (MDM) may forbid it"
        )


def _is_as_wanted(service: NetworkService | None, change: NetworkServiceChange) -> bool:
    if service is None or not service.is_enabled:
        return False
    if not change.address:
        return service.method != MANUAL
    interface = IPv4Interface(change.address)
    wanted = (MANUAL, str(interface.ip), str(interface.netmask))
    return (service.method, service.address, service.netmask) == wanted


async def _services() -> tuple[NetworkService, ...]:
    return macos_network.parse_service_order(await _read(macos_commands.SERVICE_ORDER))


async def _service(name: str) -> NetworkService | None:
    match = next((service for service in await _services() if service.name == name), None)
    return None if match is None else macos_network.with_info(match, await _info(name))


async def _info(name: str) -> str:
    return (await commands.run(*macos_commands.SERVICE_INFO.words(service=name))).out


async def _running() -> dict[str, tuple[str, ...]]:
    return dict(macos_network.parse_running_bridges(await _read(macos_commands.INTERFACES)))


async def _stored() -> dict[str, str]:
    """Return a property list with the settings of each stored bridge; PlistBuddy fails where there never was one."""
    printed = (await commands.run(*macos_commands.STORED_BRIDGES.words())).out
    entries = macos_network.parse_stored_bridges(printed)
    return {name: plistlib.dumps({name: entry}).decode() for name, entry in entries.items()}


async def _read(command: MacCommand) -> str:
    return (await commands.must_run(*command.words())).out


async def _change(command: MacCommand, **values: str) -> None:
    result = await commands.must_run(*command.words(**values))
    if "** Error" in result.out:
        raise ServiceError(f"`{result.line}` failed: {result.words}")
