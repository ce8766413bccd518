"""Collection of a report: all registered commands with several rights, and measurements of launchd and the network."""

import getpass
import json
import os
import platform
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil

from fleetctl.mac_report import lan_probe
from fleetctl.mac_report.anonymise import Anonymiser
from fleetctl.mac_report.engine_load import measure_engine
from fleetctl.mac_report.mac_programs import (
    Job,
    MacPlace,
    MacPrograms,
    RootJobs,
    read_text,
    role_prefix,
)
from fleetctl.mac_report.readings import (
    CommandRun,
    LaunchdTimings,
    NetworkProbe,
    Readings,
    RunContext,
    SecondSources,
)
from fleetctl.mac_report.report import Report, build_report
from fleetctl.services.host import ROLE_USER
from machinery import macos_commands as mac
from machinery.clock import Clock
from machinery.macos_commands import COMMANDS, MacCommand
from nodeagent.hardware import metal
from nodeagent.hardware.macos_settings import parse_neighbours
from nodeagent.hardware.service_definitions import parse_print
from schemas.wire import engine_config

_EXIT_TIMEOUT_S: Final = 5
_MAX_TRIES: Final = 8
_MAX_TARGETS: Final = 3
_PROBE_S: Final = 60.0
_SSH: Final = 22
"""A port on which a neighbour answers: with a banner, or with a refusal."""
# Writes a line each second until it is ended; SIGTERM ends it at once.
_TICKS: Final = "while :; do echo tick; sleep 1; done"
READS: Final = tuple(command for command in COMMANDS.values() if not command.is_change)
"""The commands that a report runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """Settings of one report."""

    has_sudo: bool = False
    model: Path | None = None
    key: str = ""
    """Words for the keyed hash; empty for random ones."""
    load_s: float = 30.0
    """Time for which the engine generates."""
    repetitions: int = 10
    """Ends and starts of a job of launchd."""
    place: MacPlace = field(default_factory=MacPlace)
    sources: SecondSources | None = None
    """Values of this process; None to read them."""
    device_check: Sequence[str] = (sys.executable, "-m", engine_config.DEVICE_CHECK_MODULE)


async def collect_report(
    settings: ReportSettings, clock: Clock, show: Callable[[str], object]
) -> Report:
    """Collect and anonymise a report; `show` gets the progress. Raises FleetctlError: a personal detail is left in it."""
    programs, notes = MacPrograms(settings.place, clock), list[str]()
    asked = {"sudo"} if settings.has_sudo else set[str]()
    asked |= {"model"} if settings.model else set()
    show(f"running {len(READS)} commands")
    # Others ask for a password in a window.
    of_users = [command for command in READS if command.rights == "User"]
    runs = {RunContext.USER: await _run_all(programs, of_users, ())}
    readings = Readings(
        runs=runs,
        sources=settings.sources or _second_sources(),
        metal=await metal.check_device(settings.device_check, limit_s=60.0),
    )
    if settings.has_sudo:
        readings = await _with_rights(readings, settings, programs, notes, show)
    if settings.model is not None:
        show(f"running an engine on {settings.model.name} for {settings.load_s:g} s, twice")
        try:
            engine = await measure_engine(programs, settings.model, settings.load_s)
            readings = replace(readings, engine=engine)
        except OSError as error:
            notes.append(str(error))
    readings = replace(readings, notes=tuple(notes), asked=frozenset(asked))
    hosts = {
        socket.gethostname(),
        socket.gethostname().partition(".")[0],
        readings.out(mac.LOCAL_NAME).strip(),
    }
    users = {getpass.getuser(), Path.home().name}
    key = settings.key or secrets.token_hex(16)
    return build_report(readings, Anonymiser(key, hosts=filter(None, hosts), users=users))


async def _run_all(
    programs: MacPrograms, commands: Sequence[MacCommand], prefix: Sequence[str]
) -> Mapping[MacCommand, CommandRun]:
    """Run commands one after another: together they would disturb each other's durations."""
    runs = {}
    for command in commands:
        argv = programs.examples(command)
        done = await programs.run((*prefix, *argv), timeout_s=command.timeout_s)
        runs[command] = replace(done, argv=argv)
    return runs


def _second_sources() -> SecondSources:
    try:
        memory = psutil.virtual_memory()
        addresses = psutil.net_if_addrs()
    except psutil.Error:
        return SecondSources(machine=platform.machine(), version=platform.mac_ver()[0], memory_bytes=0, wired_bytes=None, addresses=frozenset())  # fmt: skip
    return SecondSources(
        machine=platform.machine(), version=platform.mac_ver()[0], memory_bytes=memory.total,
        wired_bytes=getattr(memory, "wired", None),
        addresses=frozenset(
            (name, address.address) for name, items in addresses.items() if not name.startswith("lo")
            for address in items if address.family == socket.AF_INET
        ),
    )  # fmt: skip


async def _with_rights(
    readings: Readings, settings: ReportSettings, programs: MacPrograms, notes: list[str],
    show: Callable[[str], object],
) -> Readings:  # fmt: skip
    """Return the readings with those of the role account and of LaunchDaemons; what fails becomes a note."""
    asked = await programs.run_in_terminal(programs.argv(mac.ASK_PASSWORD))
    if asked:
        notes.append(f"sudo did not accept a password (exit code {asked})")
        return readings
    # A program outside the system's folders may belong to a user, and is not run with other rights.
    commands = [command for command in READS if programs.is_of_system(command)]
    runs = dict(readings.runs)
    show(f"running them as {ROLE_USER}")
    role = await programs.run(
        (*role_prefix(programs), *programs.examples(mac.KERNEL)), timeout_s=10.0
    )
    if role.code == 0:
        of_users = [command for command in commands if command.rights == "User"]
        runs[RunContext.ROLE] = await _run_all(programs, of_users, role_prefix(programs))
    else:
        notes.append(f"sudo -u {ROLE_USER}: {role.err.strip()[:200] or role.note}")
    jobs = RootJobs(programs)
    try:
        if problem := await jobs.open():
            notes.append(problem)
            return replace(readings, runs=runs)
        show("running them in a LaunchDaemon")
        runs[RunContext.DAEMON], open_files = await jobs.run_commands(commands)
        show(f"measuring launchd, {settings.repetitions} times")
        timings = replace(
            await measure_launchd(programs, jobs, settings.repetitions), open_files=open_files
        )
        readings = replace(readings, runs=runs, launchd=timings)
        show("trying the local network from six kinds of processes")
        return replace(readings, network=await probe_network(readings, programs, jobs, notes))
    except OSError as error:
        notes.append(str(error))
        return replace(readings, runs=runs)
    finally:
        await jobs.close()


async def measure_launchd(
    programs: MacPrograms, jobs: RootJobs, repetitions: int
) -> LaunchdTimings:
    """Return how launchd ends and loads a job. Raises OSError: it does not load one."""
    log = Path(await jobs.write("log", b""))
    settings = {"ExitTimeOut": _EXIT_TIMEOUT_S}
    started = await jobs.start(Job(argv=("/bin/sh", "-c", _TICKS), log=str(log), settings=settings))
    if started.code:
        raise OSError(f"launchctl bootstrap: {started.err.strip() or started.note}"[:200])
    ends, codes = [], []
    for _ in range(repetitions):
        ends.append(await jobs.unload() or 60.0)
        tries: list[int] = []
        while len(tries) < _MAX_TRIES and (not tries or tries[-1]):
            if tries:
                await programs.clock.sleep(0.5)
            loaded = await jobs.load()
            tries.append(-1 if loaded.code is None else loaded.code)
        codes.append(tries)
    job = parse_print((await jobs.print()).out)
    shown = await programs.call(mac.PROCESS, pid=str(job.pid or 0))
    before, after = await _truncate(programs, log)
    await programs.as_root(mac.ROOT_SIGNAL, signal="STOP", pid=str(job.pid or 0))
    stopped = await jobs.unload() if job.pid else None
    await jobs.end()
    return LaunchdTimings(
        bootout_s=ends, bootstrap_codes=codes, stopped_bootout_s=stopped, log_bytes_before=before,
        log_bytes_after_truncate=after, pid_matches="tick" in shown.out,
    )  # fmt: skip


async def _truncate(programs: MacPrograms, log: Path) -> tuple[int, int | None]:
    """Truncate the log of a running job, as the log's rotation does; return its sizes before and one line later."""
    if not await programs.wait_for(log, 10.0):
        return 0, None
    before = log.stat().st_size
    await programs.as_root(mac.ROOT_WRITE, stdin=b"", path=str(log))
    return max(before, 64), log.stat().st_size if await programs.wait_for(log, 10.0) else None


async def probe_network(
    readings: Readings, programs: MacPrograms, jobs: RootJobs, notes: list[str]
) -> tuple[NetworkProbe, ...]:
    """Return what six kinds of processes reach on the local network; what cannot be tried becomes a note."""
    neighbours = parse_neighbours(readings.out(mac.NEIGHBOURS), readings.out(mac.DEFAULT_ROUTE))
    targets = [[host, _SSH] for host in neighbours[:_MAX_TARGETS]]
    places = [[name, address, targets] for name, address in sorted(readings.sources.addresses)]
    if not places or not targets:
        notes.append(
            "no neighbour is known: ping another Mac of this network, and run the command again"
        )
        return ()
    source = Path(lan_probe.__file__).read_text(encoding="utf-8")
    argv = (os.path.realpath(sys.executable), "-I", "-S", "-c", source, json.dumps(places))
    # A child of this shell is the Terminal's; a background process of a shell that has ended is launchd's.
    outputs = {"terminal": (await programs.run(argv, timeout_s=_PROBE_S)).out}
    detach = ("/bin/sh", "-c", 'f=$1; shift; "$@" >"$f" 2>/dev/null & exit 0', "sh")
    output = Path(f"{jobs.folder}/orphan")
    await jobs.write("orphan", b"", owner=str(os.getuid()))
    await programs.start_detached((*detach, str(output), *argv))
    await programs.wait_for(output, _PROBE_S)
    outputs["orphan"] = read_text(output)
    outputs["agent"] = await _probe_agent(programs, argv)
    if reason := untrusted(Path(argv[0])):
        notes.append(f"LaunchDaemons did not try the network: {reason}")
    else:
        for kind, user in (
            ("daemon-root", ""),
            ("daemon-role", ROLE_USER),
            ("orphan-of-daemon", ""),
        ):
            path = await jobs.write(kind, b"", owner=user)
            inner = (*detach, path, *argv) if kind.startswith("orphan") else argv
            log = "/dev/null" if kind.startswith("orphan") else path
            await jobs.start(
                Job(argv=inner, log=log, user=user, settings={"AbandonProcessGroup": True})
            )
            await programs.wait_for(Path(path), _PROBE_S)
            outputs[kind] = read_text(Path(path))
            await jobs.end()
    return tuple(probe for kind, text in outputs.items() for probe in parse_probes(kind, text))


async def _probe_agent(programs: MacPrograms, argv: Sequence[str]) -> str:
    """Return the output of the probe in a LaunchAgent of this user; "" without a user at the screen."""
    folder = programs.place.agents or Path.home() / "Library" / "LaunchAgents"
    plist, out = folder / "io.mlxfleet.report.plist", folder / "io.mlxfleet.report.out"
    domain = f"gui/{os.getuid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plist.write_bytes(Job(argv=argv, log=str(out)).plist())
        loaded = await programs.call(mac.JOB_LOAD, domain=domain, path=str(plist))
        if loaded.code == 0:
            await programs.wait_for(out, _PROBE_S)
        await programs.call(mac.JOB_UNLOAD, target=f"{domain}/io.mlxfleet.report")
        return read_text(out)
    finally:
        plist.unlink(missing_ok=True)
        out.unlink(missing_ok=True)


def untrusted(program: Path) -> str:
    """Return why root must not run this interpreter; "" if only root can write it and its library."""
    for path in (program, Path(os.__file__)):
        for part in (path, *path.parents):
            state = part.stat()
            if state.st_uid != 0 or (state.st_mode & 0o022 and not state.st_mode & 0o1000):
                return f"{part} belongs to a user; install the release with its install.sh, and use that fleetctl"
    return ""


def parse_probes(process: str, text: str) -> list[NetworkProbe]:
    """Return the attempts in the output of the probe; none for any other text."""
    try:
        rows: Any = json.loads(text.strip().rpartition("\n")[2] or "[]")
        return [
            NetworkProbe(
                process=process,
                interface=str(name),
                action=str(action),
                target=str(target),
                error=int(code),
            )
            for name, action, target, code in rows
        ]
    except (ValueError, TypeError):
        return []
