"""Types of host facts: what collectors read of one machine, and checks judge.

None means "could not be read", which is neither good nor bad: its check then says UNKNOWN.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Literal, TypeAlias

from nodeagent.hardware.load import Macmon
from nodeagent.hardware.macos_settings import JetsamReport
from nodeagent.hardware.metal import MetalVerdict
from nodeagent.hardware.readings import DiskReading, RebootReading
from schemas.node import KernelPanic, NodeFabric

System: TypeAlias = Literal["macOS", "Linux"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonFacts:
    """The interpreter that runs the fleet's programs."""

    path: str
    machine: str
    """The architecture for which it was built: arm64 on a Mac that is used well."""
    is_translated: bool | None = None
    """True if Rosetta translates it."""


class Reach(StrEnum):
    """The end of one connection attempt."""

    REACHED = "Reached"
    """The address answered; a refusal is an answer, too."""
    UNREACHABLE = "Unreachable"
    """The system gave EHOSTUNREACH or ENETUNREACH at once."""
    SILENT = "Silent"
    """Nothing answered in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourProbe:
    """Connections to a machine on the same network: by a socket of this process, and by a tool of the system."""

    address: str
    port: int
    own: Reach
    tool: Reach | None = None
    """The end with `/usr/bin/nc`, which macOS always lets through; None if it was not tried."""

    @property
    def is_denied(self) -> bool:
        """Return whether only the tool of the system reaches the machine."""
        return self.own is not Reach.REACHED and self.tool is Reach.REACHED


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOrigin:
    """The start of this process, by which macOS decides whether it may use the local network."""

    is_orphan: bool
    """True if its first ancestor below process 1 is a program of the fleet and no service: its terminal has ended."""
    reaches_loopback: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FirewallFacts:
    """The application firewall of macOS."""

    is_on: bool
    blocks_all: bool = False
    is_python_allowed: bool | None = None
    """True if the interpreter is listed as allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepFacts:
    """The sleep settings for mains power."""

    sleep_minutes: int
    """Minutes without use until the machine sleeps; 0 for never."""
    blockers: tuple[str, ...] = ()
    """Processes that keep it awake now."""
    last_slept_at: datetime | None = None
    is_low_power: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundFacts:
    """The labels of services that macOS does not start."""

    disabled: frozenset[str]
    """Those disabled with launchctl."""
    disallowed: frozenset[str] | None = None
    """Those switched off in Login Items & Extensions; None without root."""


class ServiceKind(StrEnum):
    """The manager of a service."""

    SYSTEM = "system"
    """launchd's domain of the machine."""
    GUI = "gui"
    """launchd's domain of a user that is logged in at the screen."""
    SYSTEMD = "systemd"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """One installed service of the fleet."""

    name: str
    kind: ServiceKind
    pid: int | None = None
    restarts: int | None = None
    """Restarts after the program ended by itself, since its manager loaded it."""
    age_s: float | None = None
    """Seconds since the start of its present process."""
    last_exit: int | None = None
    differences: tuple[str, ...] | None = ()
    """Settings of its definition that are not as installed by this release; None if it cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFileFacts:
    """The limit of open files of this process."""

    soft: int | None
    """None for no limit."""
    hard: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """The folder of models, as this process sees it."""

    path: str
    error: Literal["", "missing", "refused", "failed"] = ""
    reason: str = ""
    """The system's words; empty if it was listed."""
    user: str = ""
    """The user of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """One engine process, or the last run of an engine that has ended."""

    replica: str
    pid: int | None
    """None if it has ended."""
    started_at: datetime | None = None
    port: int | None = None
    is_expected: bool | None = None
    """False if its agent runs and does not know it; None if no agent was asked."""
    used_bytes: int | None = None
    has_fast_synch: bool | None = None
    """True if its environment sets MLX_METAL_FAST_SYNCH."""
    in_flight: int | None = None
    """Sequences that it generates; None if unknown."""
    last_lines: tuple[str, ...] = ()
    """The end of its log."""
    is_past: bool = False
    """True for the run before the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A process that listens on a TCP port."""

    port: int
    pid: int | None = None
    program: str = ""
    """Its name; empty if it belongs to another user and cannot be read."""
    is_fleet: bool = False
    """True if it is an agent or an engine of the fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFacts:
    """The machine's clock."""

    is_synchronized: bool | None = None
    """True if the system says that a time server sets it; None if it does not say."""
    offset_s: float | None = None
    """Seconds by which a time server is ahead of it; None if none was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Everything that the checks of one machine need."""

    system: System
    is_agent: bool
    """True if the node's agent read them: limits and permissions are then its own."""
    python: PythonFacts
    models: FolderFacts | None = None
    disk: DiskReading | None = None
    open_files: OpenFileFacts | None = None
    clock: ClockFacts | None = None
    services: Sequence[ServiceFacts] | None = None
    background: BackgroundFacts | None = None
    is_user_at_screen: bool | None = None
    """True if a user is logged in at the screen."""
    neighbours: Sequence[NeighbourProbe] | None = None
    """None if this machine knows no neighbour."""
    origin: ProcessOrigin | None = None
    """None if every neighbour is reached, or none is known."""
    denials: int | None = None
    """Entries of the system's log that say that macOS kept a process from the local network."""
    firewall: FirewallFacts | None = None
    sleep: SleepFacts | None = None
    slept_s: float | None = None
    """Seconds for which the machine slept since its agent started; None if no agent was asked."""
    installs_updates: bool | None = None
    """True if macOS installs updates, and restarts, by itself."""
    has_filevault: bool | None = None
    metal: MetalVerdict | None = None
    system_version: tuple[int, int] | None = None
    """The version of macOS, such as (26, 2)."""
    fabric: NodeFabric | None = None
    default_interface: str | None = None
    """Interface of the IPv4 default route."""
    gpu: Macmon | None = None
    """The GPU's use and power; None if macmon does not show both."""
    wired: RebootReading | None = None
    """The memory that the system cannot reclaim."""
    engines: Sequence[EngineFacts] | None = None
    jetsam: Sequence[JetsamReport] | None = None
    panics: Sequence[KernelPanic] | None = None
    """Kernel panics of the last three days; None if their reports cannot be read."""
    listeners: Sequence[Listener] | None = None
    engine_ports: range = field(default_factory=lambda: range(0))
    """Ports for engines; empty if they listen on sockets."""
    api_port: int | None = None
    """The agent's port; None if it has none."""
