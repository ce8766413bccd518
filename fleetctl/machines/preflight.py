"""The preflight: whether a machine can become a node of this fleet. Pure, and before anything is changed there."""

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fleetctl.machines.facts import MachineFacts
from nodeagent.hardware.macos import RDMA_SINCE
from nodeagent.hardware.system_text import parse_system_version
from schemas import quantity
from schemas.wire.join import MAX_CLOCK_OFFSET_S

_OLDEST_MACOS: Final = 14
_SPARE_BYTES: Final = 10 << 30
_AGENT_PORT: Final = 4001
_TAILNET: Final = ipaddress.ip_network("100.64.0.0/10")
# Other model servers, by the beginning of the program's name and by their port.
_SERVERS: Final[Mapping[str, int]] = MappingProxyType(
    {"Ollama": 11434, "LM Studio": 1234, "oMLX": 0, "exo": 52415}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """The fleet that the machine shall become a part of, and what it holds already."""

    name: str
    """Name of the future node."""
    fleet: str
    machine_names: Mapping[str, str]
    """Names of the fleet's nodes by hardware UUID."""
    names: frozenset[str]
    """Names of all nodes."""
    builds: frozenset[str] = frozenset()
    """Builds of macOS on the other Macs."""
    own_identity: str = ""
    """URI of the identity in the machine's state folder; "" if it has none."""
    is_installed: bool = False
    """True if its agent is a service already."""
    needed_bytes: int = 0
    """Space for the archive and what is unpacked of it."""
    unreachable: tuple[str, ...] = ()
    """Join addresses that the machine cannot connect to; the fleet has others if it has more."""
    join_addresses: tuple[str, ...] = ()
    is_linux_allowed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightResult:
    """Reasons to refuse the machine, each with what to do; and warnings."""

    refusals: tuple[str, ...]
    warnings: tuple[str, ...]


def check_machine(facts: MachineFacts, context: NodeContext) -> PreflightResult:
    """Return what speaks against the machine."""
    return PreflightResult(
        refusals=(*_system(facts, context), *_state(facts, context), *_identity(facts, context)),
        warnings=(*_settings(facts), *_surroundings(facts, context)),
    )


def _system(facts: MachineFacts, context: NodeContext) -> Iterator[str]:
    if not facts.is_mac:
        if not context.is_linux_allowed:
            yield "it runs Linux, where MLX has no GPU; for a trial add --allow-linux"
        if not facts.has_systemd:
            yield "it has no systemd, which has to start the agent at boot"
        return
    if facts.is_translated:
        yield "its shell runs under Rosetta, where MLX does not exist. Give the user an arm64 login shell: chsh -s /bin/zsh"
    elif facts.architecture != "arm64":
        yield f"it has a {facts.architecture} processor; MLX needs Apple silicon"
    system = parse_system_version(facts.version)
    if system is None or system[0] < _OLDEST_MACOS:
        yield (
            f"it has macOS {facts.version or 'of an unknown version'}; mlx needs macOS {_OLDEST_MACOS} or newer. Update it "
            "in System Settings > General > Software Update"
        )


def _state(facts: MachineFacts, context: NodeContext) -> Iterator[str]:
    offset = facts.clock_offset_s
    if offset is not None and abs(offset) > MAX_CLOCK_OFFSET_S:
        yield (
            f"its clock is {abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'}; certificates and leases need the right "
            "time. Turn on: System Settings > General > Date & Time > Set time and date automatically"
        )
    needed = context.needed_bytes + _SPARE_BYTES
    if not context.is_installed and facts.free_bytes is not None and facts.free_bytes < needed:
        yield f"its disk has {quantity.show(facts.free_bytes)} free, and {quantity.show(needed)} are needed. Free some space"
    if not context.is_installed and _AGENT_PORT in facts.listening:
        yield f"another program listens on port {_AGENT_PORT}, which the agent needs; end it"
    if context.unreachable and set(context.unreachable) == set(context.join_addresses):
        yield (
            f"it cannot connect to the fleet at {', '.join(context.unreachable)}. Check the network between them, and the "
            "firewall of the Mac with the reconciler; --join-address names another address"
        )


def _identity(facts: MachineFacts, context: NodeContext) -> Iterator[str]:
    wanted = f"node/{context.name}"
    own = context.own_identity
    if own and f"/{context.fleet}/" not in f"{own}/":
        yield f"it belongs to another fleet: it is {own}. Remove it there first: fleetctl node remove"
    elif own and not own.endswith(f"/{wanted}"):
        yield f"it is {own} already; give that name with --name, or remove that node first"
    known = context.machine_names.get(facts.hardware_uuid) if facts.hardware_uuid else None
    if not facts.hardware_uuid:
        yield "it shows no hardware UUID, to which its name would be bound"
    elif known is not None and known != context.name:
        yield f"the fleet knows this machine as node/{known}; give that name with --name, or remove that node first"
    elif (
        known is None
        and context.name in context.names
        and context.name in context.machine_names.values()
    ):
        yield f"{wanted} is another machine; give another name with --name"


def _settings(facts: MachineFacts) -> Iterator[str]:
    if facts.is_mac and (26, 0) <= (parse_system_version(facts.version) or (0, 0)) < RDMA_SINCE:
        yield (
            f"it has macOS {facts.version}, and gets MLX's build for macOS 15: RDMA and the neural accelerators of an M5 need "
            "macOS 26.2. Update it in System Settings > General > Software Update"
        )
    if facts.is_encrypted:
        yield "FileVault is on: after a restart nothing of the fleet runs until the disk is unlocked, at its keyboard or with `fleetctl node unlock` (macOS 26)"
    if facts.sleep_minutes:
        yield f"it sleeps after {facts.sleep_minutes} min on mains; the service turns that off"
    if facts.updates_itself:
        yield "macOS installs updates by itself, and restarts the Mac for it: System Settings > General > Software Update"
    if facts.has_firewall:
        yield "its firewall is on; the service lets the agent through"
    if facts.is_on_wifi:
        yield "its network is Wi-Fi only; a cable is faster and does not drop"
    if facts.is_low_power:
        yield "Low Power Mode is on, which slows the GPU: System Settings > Battery"


def _surroundings(facts: MachineFacts, context: NodeContext) -> Iterator[str]:
    if facts.build and context.builds and facts.build not in context.builds:
        yield f"it has the macOS build {facts.build}, the others {', '.join(sorted(context.builds))}: shard groups need the same"
    if any(map(_is_tailnet, context.join_addresses)):
        yield "the join address is one of a tailnet (100.64.0.0/10); engines are faster over the local network"
    for server, port in _SERVERS.items():
        is_running = any(name.lower().startswith(server.lower()) for name in facts.programs)
        if is_running or (port and port in facts.listening):
            yield f"{server} seems to run there, and takes memory from the engines"


def _is_tailnet(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")) in _TAILNET
    except ValueError:
        return False
