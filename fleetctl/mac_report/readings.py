"""Types of a report: what was run in which kind of process, what was measured, and the verdict of each comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from fleetctl.mac_report.parsers import PARSERS
from machinery.macos_commands import MacCommand
from nodeagent.hardware.metal import MetalVerdict


class RunContext(StrEnum):
    """The kind of process that a command ran in."""

    USER = "user"
    ROLE = "role"
    """The account of the service, by sudo."""
    DAEMON = "daemon"
    """A LaunchDaemon of root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRun:
    """One run of a command."""

    argv: tuple[str, ...]
    out: str = ""
    err: str = ""
    code: int | None = None
    """None if it did not start, or was killed at its time limit."""
    seconds: float = 0.0
    note: str = ""
    """The reason why there is no code, or that the output was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondSources:
    """Values of this process and of Python's libraries, which need no command."""

    machine: str
    """`platform.machine()`."""
    version: str
    """`platform.mac_ver()`."""
    memory_bytes: int
    wired_bytes: int | None
    addresses: frozenset[tuple[str, str]]
    """(interface, IPv4 address)."""
    processors: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchdTimings:
    """Measurements of one throw-away LaunchDaemon."""

    open_files: int | None = None
    """`ulimit -n` in the job, whose definition asks for 65536."""
    bootout_s: Sequence[float] = ()
    """Seconds from bootout until the job is gone, for each repetition."""
    bootstrap_codes: Sequence[Sequence[int]] = ()
    """Exit codes of bootstrap right after, the last one 0, for each repetition."""
    stopped_bootout_s: float | None = None
    """Seconds until a stopped process was gone, whose ExitTimeOut is 5 s."""
    pid_matches: bool | None = None
    """True if `ps` has the job's process under the pid of `launchctl print`."""
    log_bytes_after_truncate: int | None = None
    """Size of the log one line after it was truncated; a gap would keep the size from before."""
    log_bytes_before: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkProbe:
    """One attempt to use the local network from one kind of process."""

    process: str
    interface: str
    action: str
    """connect or multicast."""
    target: str
    error: int
    """The errno of macOS; 0 for success, and for a refusal, which is an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory around one engine, in bytes."""

    footprint: int = 0
    wired_before: int = 0
    wired_loaded: int = 0
    wired_after_end: int = 0
    wired_after_kill: int = 0
    thermal_before: int | None = None
    thermal_after: int | None = None
    weights: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Everything that a report has read."""

    runs: Mapping[RunContext, Mapping[MacCommand, CommandRun]]
    sources: SecondSources
    metal: MetalVerdict | None = None
    launchd: LaunchdTimings | None = None
    network: Sequence[NetworkProbe] = ()
    engine: EngineMemory | None = None
    notes: Sequence[str] = ()
    """Parts that could not be read, with reasons."""
    asked: frozenset[str] = field(default_factory=frozenset)
    """Parts that the owner asked for: sudo, model."""

    def out(self, command: MacCommand, context: RunContext = RunContext.USER) -> str:
        """Return the output of a command; "" if it did not run."""
        run = self.runs.get(context, MappingProxyType({})).get(command)
        return "" if run is None else run.out

    def parsed(self, command: MacCommand) -> Any:
        """Return what production reads in the user's run; None if it printed nothing, or the parser failed."""
        text = self.out(command)
        try:
            return PARSERS[command](text) if text.strip() else None
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            return None


class Verdict(StrEnum):
    """The end of one comparison."""

    HOLDS = "Holds"
    DIFFERS = "Differs"
    MISSING = "Missing"
    """A source that every Mac has gave nothing."""
    NOT_ASKED = "NotAsked"
    """It needs a flag that was not given, or hardware that this Mac lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The verdict on two sources of one value."""

    name: str
    verdict: Verdict
    detail: str
