"""Values that every service of the fleet gives launchd or systemd, and their comparison with a definition. Pure.

`fleetctl service install` writes these values; the doctor compares what is installed with them.
"""

import plistlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from xml.parsers.expat import ExpatError

from schemas.wire import wired_limit

LABEL_PREFIX: Final = "io.mlxfleet"
UNIT_PREFIX: Final = "mlx-fleet-"
CABLES_JOB: Final = "fabric"
"""The job that applies the settings of `fleetctl fabric setup` at boot."""
OPEN_FILES: Final = 65536
"""launchd gives a job 256 open files; a gateway holds one for each client and each engine."""
_MIN_STOP_S: Final = 30

JOB_VALUES: Final[Mapping[str, Any]] = {
    "RunAtLoad": True,
    # With SuccessfulExit a program would stay ended after any polite SIGTERM.
    "KeepAlive": True,
    "ThrottleInterval": 10,
    # Engines outlive the agent that started them (ADR 0005).
    "AbandonProcessGroup": True,
    # Without it launchd throttles CPU and I/O; children inherit it.
    "ProcessType": "Interactive",
    "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
    "HardResourceLimits": {"NumberOfFiles": OPEN_FILES},
}
"""Values of every job."""
UNIT_VALUES: Final[Mapping[str, str]] = {
    # Otherwise a restart of the agent ends the engines, which are in its control group (ADR 0005).
    "KillMode": "process",
    "Restart": "always",
    "LimitNOFILE": str(OPEN_FILES),
}
"""Values of every unit."""


def label_of(name: str) -> str:
    """Return the label of a service's job."""
    return f"{LABEL_PREFIX}.{name}"


def unit_name(name: str) -> str:
    """Return the name of a service's unit."""
    return f"{UNIT_PREFIX}{name}.service"


def service_name(file_name: str) -> str | None:
    """Return the service that a property list or a unit file defines; None if it is none of a service."""
    found = re.fullmatch(
        rf"{re.escape(LABEL_PREFIX)}\.(\w+)\.plist|{UNIT_PREFIX}(\w+)\.service", file_name
    )
    name = (found[1] or found[2]) if found else None
    return None if name in (wired_limit.JOB_NAME, CABLES_JOB) else name


def job_differences(content: bytes) -> tuple[str, ...] | None:
    """Return the values of a property list that are not those of JOB_VALUES; None if it is none."""
    try:
        tree = plistlib.loads(content)
    except (plistlib.InvalidFileException, ExpatError, ValueError, LookupError, TypeError):
        return None
    if not isinstance(tree, dict):
        return None
    found = [
        f"{key} is {_shown(tree.get(key))} instead of {_shown(value)}"
        for key, value in JOB_VALUES.items()
        if tree.get(key) != value
    ]
    stop_s = tree.get("ExitTimeOut")
    if not isinstance(stop_s, int) or stop_s < _MIN_STOP_S:
        found.append(f"ExitTimeOut is {_shown(stop_s)} instead of {_MIN_STOP_S} or more")
    return tuple(found)


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    return ", ".join(map(str, value.values())) if isinstance(value, dict) else str(value)[:40]


def unit_differences(text: str) -> tuple[str, ...]:
    """Return the values of a unit file that are not those of UNIT_VALUES."""
    return tuple(_unit_differences(text))


def _unit_differences(text: str) -> Iterator[str]:
    # The last value of a key counts.
    found = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    for key, value in UNIT_VALUES.items():
        if found.get(key) != value:
            yield f"{key} is {found.get(key, 'missing')[:40]} instead of {value}"
    stop = re.fullmatch(r"(\d{1,6})s?", found.get("TimeoutStopSec", ""))
    if stop is None or int(stop[1]) < _MIN_STOP_S:
        shown = found.get("TimeoutStopSec", "missing")[:40]
        yield f"TimeoutStopSec is {shown} instead of {_MIN_STOP_S} or more"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """A loaded job, as `launchctl print` shows it."""

    pid: int | None
    runs: int
    last_exit: int | None
    exit_timeout_s: float


def parse_print(text: str) -> JobReport:
    """Return the job in the output of `launchctl print`; only lines of the outermost block count."""
    pairs = dict(re.findall(r"^\t([a-z][a-z ]*) = (.*)$", text, re.MULTILINE))
    return JobReport(
        pid=_number(pairs.get("pid", "")),
        runs=_number(pairs.get("runs", "")) or 0,
        last_exit=_number(pairs.get("last exit code", "")),
        exit_timeout_s=float(_number(pairs.get("exit timeout", "")) or 30),
    )


def _number(text: str) -> int | None:
    found = re.match(r"-?\d{1,18}", text)
    return int(found[0]) if found else None
