"""Memory of a Linux machine, or of the cgroup that limits this process. Parsing is pure; `root` is for tests."""

import re
from pathlib import Path, PurePosixPath
from typing import Final

from machinery.files import read_text

ROOT: Final = Path("/")
KIB: Final = 1024
MODEL_SHARE_PERCENT: Final = 75  # of the memory; the rest is for the system and the agent


def parse_meminfo(text: str, field: str) -> int | None:
    """Return a field of /proc/meminfo ("MemTotal: 24682416 kB") in bytes; None if it is missing."""
    kib = _field(text, field, separator=":")
    return int(kib) * KIB if kib.isdecimal() else None


def cgroup_folders(text: str) -> tuple[PurePosixPath, ...]:
    """Return the folders below /sys/fs/cgroup that may limit this process, from the text of /proc/self/cgroup.

    The limits of every ancestor apply too. A container often sees its own group mounted as the root while the path
    still names the host's; so some folders may not exist, and the caller skips them.
    """
    folders: list[PurePosixPath] = []
    for line in text.splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        is_unified = number == "0" and not controllers
        if not is_unified and "memory" not in controllers.split(","):
            continue
        mount = PurePosixPath("." if is_unified else "memory")
        below = PurePosixPath(path.lstrip("/"))
        if ".." in below.parts:  # a group outside our namespace: only its root is visible
            below = PurePosixPath()
        folders += [mount / below, *(mount / parent for parent in below.parents)]
    return tuple(dict.fromkeys(folders))


def parse_limit(text: str) -> int | None:
    """Return the value of memory.max, or of version 1's memory.limit_in_bytes; None for "max", which is no limit."""
    value = text.strip()
    return int(value) if value.isdecimal() else None


def cgroup_limit(root: Path = ROOT) -> int | None:
    """Return the lowest memory limit of this process's cgroups in bytes; None if there is none."""
    limits = [limit for limit, _ in _limited_cgroups(root)]
    return min(limits, default=None)


def memory_bytes(root: Path = ROOT) -> int | None:
    """Return the installed memory, or the lowest cgroup limit if that is less; None if /proc does not say."""
    total = parse_meminfo(read_text(root / "proc/meminfo"), "MemTotal")
    return total and min(total, cgroup_limit(root) or total)


def available_memory_bytes(root: Path = ROOT) -> int | None:
    """Return MemAvailable, or the free memory of the fullest cgroup if that is less; None if /proc does not say."""
    machine = parse_meminfo(read_text(root / "proc/meminfo"), "MemAvailable")
    if machine is None:
        return None
    return min([machine, *_cgroup_free_bytes(root)])


def _cgroup_free_bytes(root: Path) -> list[int]:
    """Return the free bytes of each limited group. Inactive page cache counts as free, as in MemAvailable."""
    free: list[int] = []
    for limit, folder in _limited_cgroups(root):
        used = parse_limit(_first_text(folder, "memory.current", "memory.usage_in_bytes"))
        if used is None:
            continue
        stat = read_text(folder / "memory.stat")
        cache = _field(stat, "total_inactive_file") or _field(stat, "inactive_file")
        free.append(max(0, limit - max(0, used - (int(cache) if cache.isdecimal() else 0))))
    return free


def _limited_cgroups(root: Path) -> list[tuple[int, Path]]:
    limited_cgroups: list[tuple[int, Path]] = []
    for below in cgroup_folders(read_text(root / "proc/self/cgroup")):
        folder = root / "sys/fs/cgroup" / below
        limit = parse_limit(_first_text(folder, "memory.max", "memory.limit_in_bytes"))
        if limit:
            limited_cgroups.append((limit, folder))
    return limited_cgroups


def _field(text: str, name: str, *, separator: str = "") -> str:
    """Return the first word behind a name at the start of a line; "" if there is none."""
    match = re.search(rf"(?m)^[ \t]*{re.escape(name)}[ \t]*{separator}[ \t]*(\S+)", text)
    return match[1] if match else ""


def _first_text(folder: Path, *names: str) -> str:
    return next(filter(None, (read_text(folder / name) for name in names)), "")
