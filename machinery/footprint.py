"""The memory that the system charges to a process: its physical footprint on macOS, its resident memory elsewhere.

On macOS resident memory omits what the GPU uses and what was compressed: a process with 102 GB of weights had 0.1 GB
resident (osaurus-ai/vmlx-swift#418; libuv PR 5217).
"""

import ctypes
import os
import resource
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import psutil

_IS_MAC: bool = sys.platform == "darwin"
_LIBRARY: Final = "/usr/lib/libproc.dylib"
# The newest version of the structure that every supported macOS fills (<sys/resource.h> of XNU).
_FLAVOR: Final = 4


class RusageInfo(ctypes.Structure):
    """`struct rusage_info_v4` of macOS."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        *((name, ctypes.c_uint64) for name in (
            "user_time", "system_time", "pkg_idle_wkups", "interrupt_wkups", "pageins",
            "wired_size", "resident_size", "phys_footprint",
        )),
        ("start_to_serviced_time", ctypes.c_uint64 * 19),
        ("logical_writes", ctypes.c_uint64),
        ("lifetime_max_phys_footprint", ctypes.c_uint64),
        ("instructions_to_runnable_time", ctypes.c_uint64 * 6),
    )  # fmt: skip


class Footprint(NamedTuple):
    """Memory of a process in bytes, now and at most so far."""

    now_bytes: int
    peak_bytes: int


ReadRusage: TypeAlias = Callable[[int, int, Any], int]
"""`proc_pid_rusage(pid, flavor, buffer)`: 0, or -1 for a process that is gone or belongs to another user."""


def mac_footprint(pid: int, read: ReadRusage) -> Footprint | None:
    """Return the footprint that macOS reports; None for a process that is gone or belongs to another user."""
    info = RusageInfo()
    if read(pid, _FLAVOR, ctypes.byref(info)) != 0:
        return None
    return Footprint(info.phys_footprint, info.lifetime_max_phys_footprint)


@cache
def _mac_reader() -> ReadRusage | None:
    """Return the function of macOS; None on other systems."""
    if not _IS_MAC:
        return None
    try:
        read = ctypes.CDLL(_LIBRARY).proc_pid_rusage
    except (OSError, AttributeError):
        return None
    read.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    read.restype = ctypes.c_int
    return read


def footprint_bytes(pid: int) -> int | None:
    """Return the memory of a process in bytes; None if it is gone, or is another user's and only root may look."""
    read = _mac_reader()
    if read is not None:
        footprint = mac_footprint(pid, read)
        return None if footprint is None else footprint.now_bytes
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, OSError):
        return None


def peak_bytes() -> int:
    """Return the most memory that the calling process has had so far, in bytes."""
    read = _mac_reader()
    footprint = None if read is None else mac_footprint(os.getpid(), read)
    if footprint is not None:
        return footprint.peak_bytes
    unit = 1 if _IS_MAC else 1024  # getrusage(2) of each system
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
