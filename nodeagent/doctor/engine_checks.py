"""Checks of services and engine processes: definitions, crash loops, memory, ports, the GPU. Pure."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from nodeagent.doctor.check import fail, finding, listed, ok, unknown, warn
from nodeagent.doctor.host_facts import (
    BackgroundFacts,
    EngineFacts,
    Listener,
    ServiceFacts,
    ServiceKind,
    System,
)
from nodeagent.hardware.load import Macmon
from nodeagent.hardware.macos_settings import JetsamReport
from nodeagent.hardware.readings import RebootReading
from nodeagent.hardware.service_definitions import label_of
from nodeagent.node.machine_conditions import stranded_thresholds
from schemas import quantity
from schemas.node import KernelPanic
from schemas.quantity import counted
from schemas.wire.findings import Finding

ORPHAN_FIX: Final = "stopped-engine"
"""SIGTERM, and after a while SIGKILL, for an engine that no agent expects."""
# Five restarts within ten minutes are no accident (omlx#2184 had 233 in a row).
_MANY_RESTARTS: Final = 5
_LOOP_AGE_S: Final = 600.0
# A GPU that computes draws more (omlx#2183 measured 4 W in a spin).
_SPIN_RATIO: Final = 0.98
_SPIN_WATTS: Final = 10.0
_MAX_NAMES: Final = 3
# The words of Metal in MLX's exceptions (mlx-lm#854, omlx#2029).
_OUT_OF_MEMORY: Final = re.compile(
    r"kIOGPUCommandBufferCallbackErrorOutOfMemory|\bInsufficient Memory\b|"
    r"\[metal::malloc\].*(?:Attempting to allocate|Resource limit)|MemoryError\b"
)
_GPU_TIMEOUT: Final = re.compile(
    r"kIOGPUCommandBufferCallbackErrorTimeout|\bCaused GPU Timeout Error\b|"
    r"kIOGPUCommandBufferCallbackErrorImpactingInteractivity"
)


def check_service_definitions(services: Sequence[ServiceFacts]) -> Iterator[Finding]:
    """Yield the installed services whose definition lets the system kill, throttle or forget them."""
    if not services:
        yield ok("no service of the fleet is installed")
    for service in services:
        definition = f"the definition of {service.name}"
        if service.differences is None:
            yield unknown(f"{definition} cannot be read")
        elif service.differences:
            yield warn(
                f"{definition} differs from this release's: {'; '.join(service.differences[:_MAX_NAMES])}",
                f"sudo fleetctl service install {service.name} -- FLAGS",
            )
        else:
            yield ok(f"{definition} is as this release installs it")


def check_crash_loops(services: Sequence[ServiceFacts]) -> Iterator[Finding]:
    """Yield the services that end again and again."""
    for service in services:
        restarts, age_s = service.restarts, service.age_s
        if restarts is None:
            yield unknown(f"the restarts of {service.name} are not counted")
        elif restarts > _MANY_RESTARTS and (age_s is None or age_s < _LOOP_AGE_S):
            age = "does not run now" if age_s is None else f"runs for {age_s:.0f} s"
            last = service.last_exit
            code = "" if last is None else f", the last time with exit code {last}"
            yield fail(
                f"{service.name} ended {restarts} times by itself{code}, and {age}",
                f"journalctl -u mlx-fleet-{service.name} -n 50"
                if service.kind is ServiceKind.SYSTEMD
                else "`fleetctl service status` names its log, whose last lines say why",
            )
        else:
            yield ok(f"{service.name} {'runs' if service.pid else 'is stopped'}")


def check_login_session(
    services: Sequence[ServiceFacts], *, is_user_at_screen: bool | None
) -> Iterator[Finding]:
    """Yield the services that run only while their user is logged in at the screen."""
    names = [service.name for service in services if service.kind is ServiceKind.GUI]
    if not names:
        yield ok("no service depends on a login at the screen")
        return
    is_alone = is_user_at_screen is False
    yield finding(
        "FAIL" if is_alone else "WARN",
        f"{', '.join(names)} runs only while its user is logged in at the screen"
        + (", and nobody is" if is_alone else ""),
        f"fleetctl service uninstall --user {names[0]}; sudo fleetctl service install {names[0]} -- FLAGS",
    )


def check_background_items(
    services: Sequence[ServiceFacts], background: BackgroundFacts
) -> Iterator[Finding]:
    """Yield the services that macOS does not start at its next boot, although they may run now."""
    labels = {label_of(service.name): service.name for service in services}
    disallowed = sorted(labels.keys() & (background.disallowed or ()))
    disabled = sorted(labels.keys() & background.disabled)
    if disallowed:
        yield fail(
            f"{listed(disallowed)} is switched off in Login Items & Extensions: it does not start at the next boot",
            'System Settings > General > Login Items & Extensions: allow it in the background; it may be called "python" or '
            '"Item from unidentified developer"',
        )
    if disabled:
        yield fail(
            f"{listed(disabled)} is disabled in launchd: it does not start at the next boot",
            f"sudo launchctl enable system/{disabled[0]} && sudo fleetctl service start {labels[disabled[0]]}",
        )
    if not (disallowed or disabled):
        rest = "" if background.disallowed is not None else (
            "; `sudo fleetctl doctor --local` also reads Login Items & Extensions"
        )  # fmt: skip
        yield ok(f"launchd has disabled no service of the fleet{rest}")


def check_gpu_spin(engines: Sequence[EngineFacts] | None, gpu: Macmon | None) -> Iterator[Finding]:
    """Yield whether the GPU waits in a loop instead of computing (omlx#2183, mlx#3142)."""
    running = _running(engines)
    fast = [engine.replica for engine in running if engine.has_fast_synch]
    flag = f"MLX_METAL_FAST_SYNCH is set for {', '.join(fast[:_MAX_NAMES])}" if fast else ""
    is_idle = bool(running) and all(engine.in_flight == 0 for engine in running)
    ratio, watts = (0.0, 0.0) if gpu is None else (gpu.gpu_ratio or 0.0, gpu.gpu_watts or 0.0)
    if is_idle and ratio >= _SPIN_RATIO and watts < _SPIN_WATTS:
        yield fail(
            f"the GPU is {ratio:.0%} active at {watts:.1f} W, and no engine generates: it spins"
            + (f"; {flag}" if flag else ""),
            "`fleetctl rollout restart` the deployment; if it stays so, restart this Mac",
        )
    elif flag:
        yield warn(
            f"{flag}: it is faster, but can deadlock and block the GPU",
            "remove it from the ShardGroup's spec.environment if ranks hang",
        )
    elif engines is None:
        yield unknown("the engine processes cannot be read")
    elif running and gpu is None:
        yield unknown(
            "the GPU's power is unknown, so that a spin cannot be told from work",
            "brew install macmon",
        )
    else:
        yield ok("no engine spins on the GPU")


def check_wired_memory(
    wired: RebootReading, engines: Sequence[EngineFacts] | None
) -> Iterator[Finding]:
    """Yield whether memory stays wired although no engine runs (omlx#2184)."""
    size = quantity.show(wired.wired_bytes)
    if engines is None or _running(engines):
        yield unknown(
            "engines run, so that their memory cannot be told from what a killed one left"
        )
    elif wired.wired_bytes >= stranded_thresholds(wired.total_bytes)[1]:
        yield warn(
            f"{size} of {quantity.show(wired.total_bytes)} are wired although no engine runs: a killed engine stranded "
            "them, or another program holds them"
        )
    else:
        yield ok(f"{size} are wired, which is normal")


def check_memory_kills(
    engines: Sequence[EngineFacts] | None, jetsam: Sequence[JetsamReport] | None, system: System
) -> Iterator[Finding]:
    """Yield the engines that Metal or the system ended because memory was short."""
    failed = _failed_engines(
        engines,
        _OUT_OF_MEMORY,
        "memory ran out",
        "lower spec.contextLength or spec.concurrency of its deployment, or keep other programs off this machine",
    )
    yield from failed
    starts = [engine.started_at for engine in engines or () if engine.started_at is not None]
    recent = [event for event in jetsam or () if starts and event.at >= min(starts)]
    if recent:
        newest = max(recent, key=lambda event: event.at)
        yield warn(
            f"macOS killed {', '.join(newest.killed[:_MAX_NAMES]) or 'a process'} because memory was short",
            "open /Library/Logs/DiagnosticReports/JetsamEvent*.ips; see `fleetctl describe node` for what is assigned",
            since=newest.at,
        )
    elif failed:
        return
    elif engines is None or (system == "macOS" and jetsam is None):
        yield unknown("the engines' logs or the system's reports cannot be read")
    else:
        yield ok("no engine ran out of memory since its start")


def check_panics(panics: Sequence[KernelPanic]) -> Iterator[Finding]:
    """Yield the recent panics of the kernel; macOS says nothing about them after the restart."""
    level = fail if len(panics) > 1 else warn
    for panic in panics:
        yield level(
            f"the kernel panicked: {panic.text or 'its report cannot be read'}", since=panic.at
        )
    if not panics:
        yield ok("the kernel did not panic within three days")


def _failed_engines(
    engines: Sequence[EngineFacts] | None, pattern: re.Pattern[str], what: str, advice: str = ""
) -> list[Finding]:
    """Return a finding for each of the first engines whose log has a line that matches, with the last such line."""
    lines = [
        (engine, next(filter(pattern.search, reversed(engine.last_lines)), None))
        for engine in engines or ()
    ]
    hit = [(engine, line.strip()[:200]) for engine, line in lines if line is not None]
    return [
        # A later run may be well.
        finding(
            "WARN" if engine.is_past else "FAIL",
            f"replica/{engine.replica}: {what}: {line}",
            advice,
            since=engine.started_at,
        )
        for engine, line in hit[:_MAX_NAMES]
    ]


def check_gpu_timeouts(engines: Sequence[EngineFacts]) -> list[Finding]:
    """Return the engines whose command the GPU gave up (omlx#2029: a long prefill beside other users of the GPU)."""
    return _failed_engines(engines, _GPU_TIMEOUT, "the GPU gave up a command") or [
        ok("no engine's log has a GPU timeout")
    ]


def check_stopped_engines(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    """Yield the engines that no agent expects, and that still run, listen or hold memory (omlx#3431)."""
    running = _running(engines)
    orphans = [engine for engine in running if engine.is_expected is False]
    for engine in orphans:
        size = engine.used_bytes
        held = "" if size is None else f" and holds {quantity.show(size)}"
        port = "" if engine.port is None else f" on port {engine.port}"
        yield fail(
            f"an engine of replica/{engine.replica} still runs{port}{held}, and its agent does not know it (pid {engine.pid})",
            f"kill {engine.pid}",
            since=engine.started_at,
            fix=ORPHAN_FIX,
        )
    number = counted(len(running), "engine runs", "engines run")
    if not running:
        yield ok("no engine runs on this machine")
    elif any(engine.is_expected is None for engine in running):
        yield unknown(
            f"{number} on this machine; only the agent knows which of them it expects",
            "fleetctl doctor --node NAME asks the agent",
        )
    elif not orphans:
        yield ok(f"{number}, and the agent knows all of them")


def check_ports(
    listeners: Sequence[Listener], engine_ports: range, api_port: int | None
) -> Iterator[Finding]:
    """Yield the ports of the agent and its engines at which another program listens."""

    def holder(listener: Listener) -> str:
        if listener.pid is None:
            return "a program of another user"
        return f"{listener.program or 'a program'} (pid {listener.pid})"

    others = [listener for listener in listeners if not listener.is_fleet]
    api = [listener for listener in others if listener.port == api_port]
    taken = [listener for listener in others if listener.port in engine_ports]
    if api:
        yield fail(
            f"port {api_port} of the agent is taken by {holder(api[0])}",
            "start the agent with another --api-port, or end that program",
        )
    if taken:
        names = ", ".join(
            f"{listener.port} by {holder(listener)}" for listener in taken[:_MAX_NAMES]
        )
        yield finding(
            "WARN" if len(engine_ports) > len({listener.port for listener in taken}) else "FAIL",
            f"{len(taken)} of the engines' ports are taken: {names}",
            "start the agent with another --engine-port if too few are left",
        )
    if not api and not taken:
        span = f" {engine_ports[0]} to {engine_ports[-1]}" if engine_ports else ""
        yield ok(f"no other program listens on the fleet's ports{span}")


def _running(engines: Sequence[EngineFacts] | None) -> list[EngineFacts]:
    return [engine for engine in engines or () if engine.pid is not None]
