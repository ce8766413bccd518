"""The memory of a process: this machine's own processes, and what macOS's proc_pid_rusage writes."""

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from machinery import footprint
from machinery.footprint import Footprint, RusageInfo, footprint_bytes, mac_footprint

GB = 10**9


def test_the_structure_is_that_of_macos() -> None:
    """Offsets of <sys/resource.h> of XNU, rusage_info_v4."""
    offsets = {
        name: getattr(RusageInfo, name).offset
        for name in ("resident_size", "phys_footprint", "lifetime_max_phys_footprint")
    }
    assert offsets == {
        "resident_size": 64,
        "phys_footprint": 72,
        "lifetime_max_phys_footprint": 240,
    }
    assert ctypes.sizeof(RusageInfo) == 296


def proc_pid_rusage(processes: dict[int, bytes]) -> Callable[[int, int, Any], int]:
    """Return a stand-in for the function of macOS, which knows these processes of the caller's user."""

    def read(pid: int, flavor: int, buffer: Any) -> int:
        assert flavor == 4
        if pid not in processes:
            return -1
        ctypes.memmove(buffer, processes[pid], 296)
        return 0

    return read


def test_memory_of_the_gpu_counts_although_it_is_not_resident() -> None:
    # osaurus-ai/vmlx-swift#418: 0.1 GB resident, a footprint of 102 GB.
    counters = struct.pack("<16x5Q3Q", 1, 2, 3, 4, 5, 0, GB // 10, 102 * GB)
    info = (counters.ljust(240, b"\0") + struct.pack("<Q", 107 * GB)).ljust(296, b"\0")
    read = proc_pid_rusage({7: info})
    assert mac_footprint(7, read) == Footprint(102 * GB, 107 * GB)
    assert mac_footprint(8, read) is None


def test_memory_of_a_process_of_this_machine() -> None:
    code = "import sys; block = b'x' * (64 << 20); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 64 << 20 < (footprint_bytes(child.pid) or 0) < 256 << 20
    assert footprint_bytes(child.pid) is None


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS counts more than what is resident")
def test_elsewhere_it_is_what_is_resident() -> None:
    used = footprint_bytes(os.getpid())
    assert used is not None
    assert abs(used - psutil.Process().memory_info().rss) < 16 << 20
    assert footprint.peak_bytes() >= used - (16 << 20)
