"""Checks of services and engine processes: definitions, crash loops, memory, ports, the GPU. Pure."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from nodeagent.doctor.host_facts import EngineFacts, HostFacts, Listener, ServiceFacts, ServiceKind
from nodeagent.doctor.system_checks import ok, unknown
from nodeagent.node.machine_conditions import stranded_thresholds
from schemas import quantity
from schemas.wire.findings import Finding, Level

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


def check_service_definitions(facts: HostFacts) -> Iterator[Finding]:
    """Yield the installed services whose definition lets the system kill, throttle or forget them."""
    check = "service definition"
    if facts.services is None:
        yield unknown(check, "the installed services cannot be read")
        return
    if not facts.services:
        yield ok(check, "no service of the fleet is installed")
        return
    for one in facts.services:
        if one.differences is None:
            yield unknown(check, f"the definition of {one.name} cannot be read")
        elif one.differences:
            yield Finding(
                check=check,
                level="WARN",
                message=f"the definition of {one.name} differs from this release's: "
                f"{'; '.join(one.differences[:_MAX_NAMES])}",
                advice=f"sudo fleetctl service install {one.name} -- FLAGS",
            )
        else:
            yield ok(check, f"the definition of {one.name} is as this release installs it")


def check_crash_loops(facts: HostFacts) -> Iterator[Finding]:
    """Yield the services that end again and again."""
    check = "crash loop"
    if facts.services is None:
        yield unknown(check, "the service manager does not answer")
        return
    for one in facts.services:
        if one.restarts is None:
            yield unknown(check, f"the restarts of {one.name} are not counted")
        elif _is_looping(one):
            age = "does not run now" if one.age_s is None else f"runs for {one.age_s:.0f} s"
            code = (
                "" if one.last_exit is None else f", the last time with exit code {one.last_exit}"
            )
            yield Finding(
                check=check,
                level="FAIL",
                message=f"{one.name} ended {one.restarts} times by itself{code}, and {age}",
                advice=_log_advice(one),
            )
        else:
            yield ok(check, f"{one.name} {'runs' if one.pid else 'is stopped'}")


def _is_looping(service: ServiceFacts) -> bool:
    return (
        service.restarts is not None
        and service.restarts > _MANY_RESTARTS
        and (service.age_s is None or service.age_s < _LOOP_AGE_S)
    )


def _log_advice(service: ServiceFacts) -> str:
    if service.kind is ServiceKind.SYSTEMD:
        return f"journalctl -u mlx-fleet-{service.name} -n 50"
    return "`fleetctl service status` names its log, whose last lines say why"


def check_login_session(facts: HostFacts) -> Iterator[Finding]:
    """Yield the services that run only while their user is logged in at the screen."""
    check = "login session"
    if facts.services is None:
        yield unknown(check, "the installed services cannot be read")
        return
    agents = [one.name for one in facts.services if one.kind is ServiceKind.GUI]
    if not agents:
        yield ok(check, "no service depends on a login at the screen")
        return
    names, is_alone = ", ".join(agents), facts.is_user_at_screen is False
    yield Finding(
        check=check,
        level="FAIL" if is_alone else "WARN",
        message=f"{names} runs only while its user is logged in at the screen"
        + (", and nobody is" if is_alone else ""),
        advice=f"fleetctl service uninstall --user {agents[0]}; sudo fleetctl service install {agents[0]} -- FLAGS",
    )


def check_gpu_spin(facts: HostFacts) -> Iterator[Finding]:
    """Yield whether the GPU waits in a loop instead of computing (omlx#2183, mlx#3142)."""
    check, engines = "gpu spin", _running(facts)
    fast = [one.replica for one in engines if one.has_fast_synch]
    flag = f"MLX_METAL_FAST_SYNCH is set for {', '.join(fast[:_MAX_NAMES])}" if fast else ""
    is_idle = bool(engines) and all(one.in_flight == 0 for one in engines)
    ratio, watts = (0.0, 0.0) if facts.gpu is None else (facts.gpu.gpu_ratio, facts.gpu.gpu_watts)
    if is_idle and (ratio or 0.0) >= _SPIN_RATIO and (watts or 0.0) < _SPIN_WATTS:
        yield Finding(
            check=check,
            level="FAIL",
            message=f"the GPU is {ratio:.0%} active at {watts:.1f} W, and no engine generates: it spins"
            + (f"; {flag}" if flag else ""),
            advice="`fleetctl rollout restart` the deployment; if it stays so, restart this Mac",
        )
    elif flag:
        yield Finding(
            check=check,
            level="WARN",
            message=f"{flag}: it is faster, but can deadlock and block the GPU",
            advice="remove it from the ShardGroup's spec.environment if ranks hang",
        )
    elif facts.engines is None:
        yield unknown(check, "the engine processes cannot be read")
    elif engines and facts.gpu is None:
        yield unknown(
            check,
            "the GPU's power is unknown, so that a spin cannot be told from work",
            "brew install macmon",
        )
    else:
        yield ok(check, "no engine spins on the GPU")


def check_wired_memory(facts: HostFacts) -> Iterator[Finding]:
    """Yield whether memory stays wired although no engine runs (omlx#2184)."""
    check, wired = "wired memory", facts.wired
    if wired is None:
        yield unknown(check, "the wired memory cannot be read")
    elif facts.engines is None or _running(facts):
        yield unknown(
            check, "engines run, so that their memory cannot be told from what a killed one left"
        )
    elif wired.wired_bytes >= stranded_thresholds(wired.total_bytes)[1]:
        yield Finding(
            check=check,
            level="WARN",
            message=f"{quantity.show(wired.wired_bytes)} of {quantity.show(wired.total_bytes)} are wired although no "
            "engine runs: a killed engine stranded them, or another program holds them",
            advice="quit Ollama and LM Studio; if it stays so, restart this Mac",
        )
    else:
        yield ok(check, f"{quantity.show(wired.wired_bytes)} are wired, which is normal")


def check_memory_kills(facts: HostFacts) -> Iterator[Finding]:
    """Yield the engines that Metal or the system ended because memory was short."""
    check, engines = "memory kills", facts.engines or ()
    hit = [one for one in engines if _line_of(one, _OUT_OF_MEMORY)]
    for one in hit[:_MAX_NAMES]:
        yield Finding(
            check=check,
            level=_level_of_run(one),
            message=f"replica/{one.replica}: memory ran out: {_line_of(one, _OUT_OF_MEMORY)}",
            advice="lower spec.contextLength or spec.concurrency of its deployment, or keep other programs off this machine",
            since=one.started_at,
        )
    starts = [one.started_at for one in engines if one.started_at is not None]
    recent = [event for event in facts.jetsam or () if starts and event.at >= min(starts)]
    if recent:
        newest = max(recent, key=lambda event: event.at)
        yield Finding(
            check=check,
            level="WARN",
            message=f"macOS killed {', '.join(newest.killed[:_MAX_NAMES]) or 'a process'} because memory was short",
            advice="open /Library/Logs/DiagnosticReports/JetsamEvent*.ips; see `fleetctl describe node` for what is assigned",
            since=newest.at,
        )
    if hit or recent:
        return
    if facts.engines is None or (facts.system == "macOS" and facts.jetsam is None):
        yield unknown(check, "the engines' logs or the system's reports cannot be read")
    else:
        yield ok(check, "no engine ran out of memory since its start")


def _level_of_run(engine: EngineFacts) -> Level:
    """Return the level of a failure: a later run may be well."""
    return "WARN" if engine.is_past else "FAIL"


def check_gpu_timeouts(facts: HostFacts) -> Iterator[Finding]:
    """Yield the engines whose command the GPU gave up (omlx#2029: a long prefill beside other users of the GPU)."""
    if facts.engines is None:
        yield unknown("gpu timeout", "the engines' logs cannot be read")
        return
    hit = [one for one in facts.engines if _line_of(one, _GPU_TIMEOUT)]
    for one in hit[:_MAX_NAMES]:
        yield Finding(
            check="gpu timeout",
            level=_level_of_run(one),
            message=f"replica/{one.replica}: the GPU gave up a command: {_line_of(one, _GPU_TIMEOUT)}",
            advice="end other programs that use the GPU on this Mac (video calls, games, other engines)",
            since=one.started_at,
        )
    if not hit:
        yield ok("gpu timeout", "no engine's log has a GPU timeout")


def check_stopped_engines(facts: HostFacts) -> Iterator[Finding]:
    """Yield the engines that no agent expects, and that still run, listen or hold memory (omlx#3431)."""
    check = "stopped engines"
    if facts.engines is None:
        yield unknown(check, "the engine processes cannot be read")
        return
    running = _running(facts)
    orphans = [one for one in running if one.is_expected is False]
    for one in orphans:
        held = (
            "" if one.resident_bytes is None else f" and holds {quantity.show(one.resident_bytes)}"
        )
        port = "" if one.port is None else f" on port {one.port}"
        yield Finding(
            check=check,
            level="FAIL",
            message=f"an engine of replica/{one.replica} still runs{port}{held}, and its agent does not know it (pid {one.pid})",
            advice=f"kill {one.pid}",
            since=one.started_at,
            fix=ORPHAN_FIX,
        )
    if not running:
        yield ok(check, "no engine runs on this machine")
    elif any(one.is_expected is None for one in running):
        yield unknown(
            check,
            f"{_count(running)} on this machine; only the agent knows which of them it expects",
            "fleetctl doctor --node NAME asks the agent",
        )
    elif not orphans:
        yield ok(check, f"{_count(running)}, and the agent knows all of them")


def _count(running: Sequence[EngineFacts]) -> str:
    return f"{len(running)} {'engine runs' if len(running) == 1 else 'engines run'}"


def check_ports(facts: HostFacts) -> Iterator[Finding]:
    """Yield the ports of the agent and its engines at which another program listens."""
    check = "ports"
    if facts.listeners is None:
        yield unknown(check, "the listening sockets cannot be read")
        return
    others = [one for one in facts.listeners if not one.is_fleet]
    api = [one for one in others if one.port == facts.api_port]
    taken = [one for one in others if one.port in facts.engine_ports]
    if api:
        yield Finding(
            check=check,
            level="FAIL",
            message=f"port {facts.api_port} of the agent is taken by {_holder(api[0])}",
            advice="start the agent with another --api-port, or end that program",
        )
    free = len(facts.engine_ports) - len({one.port for one in taken})
    if taken:
        names = ", ".join(f"{one.port} by {_holder(one)}" for one in taken[:_MAX_NAMES])
        yield Finding(
            check=check,
            level="WARN" if free else "FAIL",
            message=f"{len(taken)} of the engines' ports are taken: {names}",
            advice="start the agent with another --engine-port if too few are left",
        )
    if not api and not taken:
        ports = facts.engine_ports
        span = f" {ports[0]} to {ports[-1]}" if ports else ""
        yield ok(check, f"no other program listens on the fleet's ports{span}")


def _holder(one: Listener) -> str:
    if one.pid is None:
        return "a program of another user"
    return f"{one.program or 'a program'} (pid {one.pid})"


def _running(facts: HostFacts) -> list[EngineFacts]:
    return [one for one in facts.engines or () if one.pid is not None]


def _line_of(engine: EngineFacts, pattern: re.Pattern[str]) -> str:
    """Return the last line that matches, shortened; "" if none does."""
    for line in reversed(engine.last_lines):
        if pattern.search(line):
            return line.strip()[:200]
    return ""
