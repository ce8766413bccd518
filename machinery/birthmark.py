"""What tells a process from a later one with its pid: the moment it was started, as a text.

On Linux that is the kernel's own count of ticks, with the boot it counts from. The wall time that
libraries derive from it moves when the machine's clock is set, and an adopted process would then
be taken for a stranger.
"""

import sys
from pathlib import Path

import psutil

_STARTTIME = 19  # the 22nd field of /proc/PID/stat (proc(5)), counted from behind the name
_PROC = Path("/proc")


def of(pid: int) -> str:
    """Return the mark of a running process.

    Raises:
        psutil.Error: there is none with that pid, or it may not be looked at.

    """
    if sys.platform != "linux":
        return f"{psutil.Process(pid).create_time():.3f}"
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(pid) from error
    except OSError as error:
        raise psutil.AccessDenied(pid) from error
    # The name may hold blanks and brackets; the last bracket ends it.
    return f"{boot}/{stat.rpartition(')')[2].split()[_STARTTIME]}"
