"""Unit files of systemd services, and the table of the keys that they may have."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from fleetctl.services.port import ServiceSpec
from nodeagent.hardware.service_definitions import UNIT_VALUES

KEYS: Final[Mapping[str, frozenset[str]]] = {
    "Unit": frozenset({"Description", "After", "Wants", "StartLimitIntervalSec"}),
    "Service": frozenset(
        {
            *("Type", "ExecStart", "User", "Group", "WorkingDirectory", "Environment", "KillMode"),
            *("Restart", "RestartSec", "TimeoutStopSec", "LimitNOFILE", "NoNewPrivileges"),
            *("ProtectSystem", "ReadWritePaths"),
        }
    ),
    "Install": frozenset({"WantedBy"}),
}
"""The keys that we write: systemd.unit(5), systemd.service(5), systemd.exec(5), systemd.kill(5).

systemd ignores a misspelt key with a warning in its journal.
"""
_MIN_STOP_S: Final = 60


def service_unit(spec: ServiceSpec, *, is_user: bool) -> str:
    """Return the unit file of a service; `is_user` for the manager of one user, which can protect no system folders."""
    sections = {
        "Unit": _unit(spec, is_user=is_user),
        "Service": [*_service(spec), *([] if is_user else _protection(spec))],
        "Install": [("WantedBy", "default.target" if is_user else "multi-user.target")],
    }
    blocks = [
        "\n".join([f"[{title}]", *(f"{key}={value}" for key, value in pairs)])
        for title, pairs in sections.items()
    ]
    text = "\n\n".join(blocks) + "\n"
    check(text)
    return text


def _unit(spec: ServiceSpec, *, is_user: bool) -> list[tuple[str, str]]:
    # The manager of a user knows no units of the system.
    network = [] if is_user else [(key, "network-online.target") for key in ("After", "Wants")]
    return [
        ("Description", f"mlx-fleet {spec.name}"),
        *network,
        # Without it systemd gives up after five restarts in ten seconds.
        ("StartLimitIntervalSec", "0"),
    ]


def _service(spec: ServiceSpec) -> Iterator[tuple[str, str]]:
    yield "Type", "exec"
    yield "ExecStart", " ".join(map(quote, spec.command))
    if spec.user:
        yield "User", spec.user
    if spec.group:
        yield "Group", spec.group
    yield "WorkingDirectory", _escape_specifiers(str(spec.working_folder))
    for key, value in spec.environment:
        yield "Environment", quote(f"{key}={value}", is_command=False)
    yield "KillMode", UNIT_VALUES["KillMode"]
    yield "Restart", UNIT_VALUES["Restart"]
    yield "RestartSec", "1"
    yield "TimeoutStopSec", str(max(_MIN_STOP_S, spec.stop_timeout_s))
    yield "LimitNOFILE", UNIT_VALUES["LimitNOFILE"]


def _protection(spec: ServiceSpec) -> list[tuple[str, str]]:
    # "-": a folder that does not exist yet must not keep the service from starting.
    writable = " ".join(quote(f"-{path}", is_command=False) for path in spec.writable)
    return [
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        *([("ReadWritePaths", writable)] if writable else []),
    ]


def quote(word: str, *, is_command: bool = True) -> str:
    r"""Return one word of a unit file (systemd.syntax(7)): quotes, `\`, `%` and in commands `$` lose their meaning.

    Raises:
        ValueError: it contains a line break.

    """
    if "\n" in word or "\r" in word:
        raise ValueError(f"a unit file cannot hold a word with a line break: {word!r}")
    text = _escape_specifiers(word.replace("\\", "\\\\").replace('"', '\\"'))
    if is_command:
        text = text.replace("$", "$$")
    return f'"{text}"' if set(word) & set(" \t\"'\\;") or not word else text


def _escape_specifiers(text: str) -> str:
    return text.replace("%", "%%")


def check(text: str) -> None:
    """Check the sections, the keys and the executable of a unit file.

    Raises:
        ValueError: one is unknown, or the executable is no absolute path.

    """
    section = ""
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            section = line.strip("[]")
            continue
        key, _, value = line.partition("=")
        if key not in KEYS.get(section, frozenset()):
            raise ValueError(f"systemd has no key {key} in section [{section}]")
        if key == "ExecStart" and not Path(value.lstrip('"')).is_absolute():
            raise ValueError("ExecStart must start with an absolute path")
