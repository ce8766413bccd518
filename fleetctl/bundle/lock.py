"""Lock files: the pinned packages, which of them a platform needs, and the wheels that a platform accepts."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement

from fleetctl.cli.errors import FleetctlError

PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
"""The versions of Python that mlx-fleet supports."""

OLDEST_MACOS: Final = "14.0"
"""The oldest macOS that the wheels of mlx accept."""

# A lock file of ours has 100 packages.
_MAX_PINS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A package at one version, and the hashes of all its files."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    @property
    def requirement(self) -> str:
        """The pin without hashes and marker."""
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A kind of machine: its name, the platform tags of wheels that it runs, and its values for markers."""

    name: str
    tags: tuple[str, ...]
    markers: Mapping[str, str]
    etcd: str
    """The name that releases of etcd have for it."""
    builds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tags of further wheels, by package; the installer takes the best for its machine."""

    def needs(self, pin: Pin, python: str) -> bool:
        """Return whether an installation with this Python, such as 3.11, needs the package."""
        if not pin.marker:
            return True
        marker = Requirement(f"{pin.name}; {pin.marker}").marker
        assert marker is not None
        values = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
        return marker.evaluate({**self.markers, **values})


_CPYTHON: Final = {
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "os_name": "posix",
}

PLATFORMS: Final = {
    "macos-arm64": Platform(
        name="macos-arm64",
        tags=("macosx_14_0_arm64",),  # pip adds the older ones, and universal2
        markers={
            **_CPYTHON,
            "sys_platform": "darwin",
            "platform_system": "Darwin",
            "platform_machine": "arm64",
        },
        etcd="darwin-arm64",
        # Only the build for 26 has JACCL and the M5's kernels, and that build does not run on 14 and 15.
        builds=dict.fromkeys(("mlx", "mlx-metal"), ("macosx_15_0_arm64", "macosx_26_0_arm64")),
    ),
    "linux-x86_64": Platform(
        name="linux-x86_64",
        # glibc 2.35 is what mlx-cpu needs.
        tags=(
            *(f"manylinux_2_{minor}_x86_64" for minor in range(35, 4, -1)),
            "manylinux2014_x86_64",
            "manylinux2010_x86_64",
            "manylinux1_x86_64",
            "linux_x86_64",
        ),
        markers={
            **_CPYTHON,
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": "x86_64",
        },
        etcd="linux-amd64",
    ),
}


def read_pins(text: str, *, source: str) -> tuple[Pin, ...]:
    """Return the packages of a lock file that `uv pip compile --generate-hashes` wrote.

    Raises:
        FleetctlError: a line is not a pin with hashes.

    """
    lines = (line for line in text.replace("\\\n", " ").splitlines() if not _is_comment(line))
    pins = tuple(_read_pin(line, source) for line in lines)
    if len(pins) > _MAX_PINS:
        raise FleetctlError(f"{source}: {len(pins)} packages; at most {_MAX_PINS} are expected")
    return pins


def _is_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _read_pin(line: str, source: str) -> Pin:
    before, *hashes = re.split(r"\s+--hash=", line.strip())
    try:
        requirement = Requirement(before)
    except InvalidRequirement as error:
        raise FleetctlError(f"{source}: {before!r} is not a requirement: {error}") from error
    pinned = re.fullmatch(r"==([\w.!+]+)", str(requirement.specifier))
    if pinned is None or not hashes:
        raise FleetctlError(
            f"{source}: expected `NAME==VERSION --hash=...`, found {before!r}; `make lock` writes such files"
        )
    marker = str(requirement.marker) if requirement.marker is not None else ""
    return Pin(name=requirement.name, version=pinned[1], marker=marker, hashes=tuple(hashes))


def render_lock(pins: Iterable[Pin]) -> str:
    """Return the lock file of the packages, without markers."""
    return "".join(
        " \\\n".join([pin.requirement, *(f"    --hash={digest}" for digest in pin.hashes)]) + "\n"
        for pin in pins
    )
