"""Readers of installed services: their definitions, and the reports of launchd and systemd."""

import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Final

import psutil

from machinery import macos_commands
from nodeagent.doctor.host_facts import ServiceFacts, ServiceKind
from nodeagent.doctor.readers import CommandRunner
from nodeagent.hardware.service_definitions import (
    job_differences,
    label_of,
    parse_print,
    service_name,
    unit_differences,
    unit_name,
)
from nodeagent.hardware.system_text import parse_pairs

_MAX_DEFINITION: Final = 1 << 20
_PROPERTIES: Final = "LoadState,MainPID,NRestarts,ExecMainStatus"


async def read_jobs(
    run: CommandRunner, root: Path, home: Path, now: datetime
) -> tuple[ServiceFacts, ...]:
    """Return the services of launchd: those of the machine, and those of this user."""
    jobs = []
    for folder, kind, domain in (
        (root / "Library" / "LaunchDaemons", ServiceKind.SYSTEM, "system"),
        (home / "Library" / "LaunchAgents", ServiceKind.GUI, f"gui/{os.getuid()}"),
    ):
        for name, content in _definitions(folder, "*.plist"):
            printed = await run(macos_commands.JOB.argv(target=f"{domain}/{label_of(name)}"))
            # A job that is not loaded prints nothing but an error.
            job = parse_print(printed) if printed and " = {" in printed else None
            service = ServiceFacts(
                name=name,
                kind=kind,
                # 0 for a service that launchd has not loaded, unknown if it did not answer.
                restarts=None if printed is None else 0,
                differences=None if content is None else job_differences(content),
            )
            if job is not None:
                service = replace(
                    service,
                    pid=job.pid,
                    restarts=max(0, job.runs - 1),
                    age_s=age_s(job.pid, now),
                    last_exit=job.last_exit,
                )
            jobs.append(service)
    return tuple(jobs)


async def read_units(
    run: CommandRunner, root: Path, home: Path, now: datetime
) -> tuple[ServiceFacts, ...]:
    """Return the services of systemd: those of the machine, and those of this user."""
    units = []
    for folder, scope in (
        (root / "etc" / "systemd" / "system", ()),
        (home / ".config" / "systemd" / "user", ("--user",)),
    ):
        for name, content in _definitions(folder, "*.service"):
            words = ("systemctl", *scope, "show", f"--property={_PROPERTIES}", unit_name(name))
            report = parse_pairs(await run(words) or "", separator="=")
            is_loaded = report.get("LoadState") == "loaded"
            pid = _number(report.get("MainPID")) or None
            units.append(
                ServiceFacts(
                    name=name,
                    kind=ServiceKind.SYSTEMD,
                    pid=pid,
                    restarts=_number(report.get("NRestarts")) if is_loaded else None,
                    age_s=age_s(pid, now),
                    last_exit=None if pid else _number(report.get("ExecMainStatus")),
                    differences=None
                    if content is None
                    else unit_differences(content.decode(errors="replace")),
                )
            )
    return tuple(units)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else None


def _definitions(folder: Path, pattern: str) -> Iterator[tuple[str, bytes | None]]:
    """Yield the name and the definition of each service in a folder; None for one that cannot be read."""
    try:
        paths = sorted(folder.glob(pattern))
    except OSError:
        return
    for path in paths:
        name = service_name(path.name)
        if name is None:
            continue
        try:
            with path.open("rb") as file:
                yield name, file.read(_MAX_DEFINITION)
        except OSError:
            yield name, None


def age_s(pid: int | None, now: datetime) -> float | None:
    """Return the seconds since the start of a process; None if there is none."""
    try:
        started = None if pid is None else psutil.Process(pid).create_time()
    except psutil.Error:
        return None
    return None if started is None else max(0.0, now.timestamp() - started)
