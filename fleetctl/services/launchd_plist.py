"""Property lists of launchd jobs, and the table of the keys that they may have."""

import plistlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fleetctl.services.port import ServiceSpec
from nodeagent.hardware.service_definitions import JOB_VALUES, label_of

_ROTATION_PERIOD_S: Final = 60

KEY_TYPES: Final[Mapping[str, type]] = {
    "AbandonProcessGroup": bool,
    "EnvironmentVariables": dict,
    "ExitTimeOut": int,
    "GroupName": str,
    "HardResourceLimits": dict,
    "KeepAlive": bool,
    "Label": str,
    "ProcessType": str,
    "ProgramArguments": list,
    "RunAtLoad": bool,
    "SoftResourceLimits": dict,
    "StandardErrorPath": str,
    "StandardOutPath": str,
    "StartInterval": int,
    "ThrottleInterval": int,
    "UserName": str,
    "WorkingDirectory": str,
}
"""The keys that we write, with their types in launchd.plist(5). launchd ignores a misspelt key in silence."""
_PROCESS_TYPES: Final = ("Background", "Standard", "Adaptive", "Interactive")


def service_plist(spec: ServiceSpec) -> bytes:
    """Return the property list of a service's job."""
    return encode(
        {
            "Label": label_of(spec.name),
            "ProgramArguments": list(spec.command),
            **_owner(spec),
            **JOB_VALUES,
            "ExitTimeOut": spec.stop_timeout_s,
            "StandardOutPath": str(spec.log),
            "StandardErrorPath": str(spec.log),
            "EnvironmentVariables": dict(spec.environment),
            "WorkingDirectory": str(spec.working_folder),
        }
    )


def rotation_name(name: str) -> str:
    """Return the name of the job that keeps a service's log bounded."""
    return f"{name}.logrotation"


def rotation_plist(spec: ServiceSpec) -> bytes:
    """Return the property list of the job that keeps the log bounded.

    newsyslog renames a log, and launchd keeps the old file open for the program: it would grow without a bound. So the
    log is copied and truncated; launchd opens logs for appending.
    """
    return encode(
        {
            "Label": label_of(rotation_name(spec.name)),
            "ProgramArguments": [str(spec.python), "-m", "machinery.log_rotation", str(spec.log)],
            **_owner(spec),
            "StartInterval": _ROTATION_PERIOD_S,
            "ProcessType": "Background",
            "WorkingDirectory": str(spec.working_folder),
        }
    )


def command_plist(name: str, command: tuple[str, ...]) -> bytes:
    """Return the property list of a job that runs one command as root at each boot."""
    return encode({"Label": label_of(name), "ProgramArguments": list(command), "RunAtLoad": True})


def encode(tree: Mapping[str, Any]) -> bytes:
    """Return the property list as XML; refuse keys and types that launchd.plist(5) does not have.

    Raises:
        ValueError: a key is unknown or has another type.

    """
    check(tree)
    return plistlib.dumps(dict(tree))


def check(tree: Mapping[str, Any]) -> None:
    """Check a job's keys against the table.

    Raises:
        ValueError: a key is unknown or has another type.

    """
    for key, value in tree.items():
        expected = KEY_TYPES.get(key)
        # A bool is an int to isinstance().
        if expected is None or type(value) is not expected:
            raise ValueError(f"launchd.plist(5) has no key {key} of type {type(value).__name__}")
    if tree.get("ProcessType", "Standard") not in _PROCESS_TYPES:
        raise ValueError(f"ProcessType {tree['ProcessType']} is none of {_PROCESS_TYPES}")
    arguments = tree["ProgramArguments"]
    if not arguments or not Path(arguments[0]).is_absolute():
        raise ValueError("ProgramArguments must start with an absolute path: launchd has no PATH")


def _owner(spec: ServiceSpec) -> dict[str, str]:
    user = {"UserName": spec.user} if spec.user else {}
    return {**user, "GroupName": spec.group} if spec.group else user
