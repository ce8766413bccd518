"""Ends the processes that a run of tests leaves behind, also when the run itself is killed.

Run as a program, it watches the process that started it.
"""

import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil

# In the environment of all processes of a run.
_RUN = "FLEET_TEST_RUN"
_PERIOD_S = 0.5
_GRACE_S = 3.0
_SCANS = 20
_QUIET_SCANS = 3


def start() -> None:
    """Start a reaper for this process and what it starts from now on, unless there is one."""
    if _RUN in os.environ:
        return
    os.environ[_RUN] = secrets.token_hex(8)
    argv = [sys.executable, "-m", __name__, str(os.getpid())]
    # Ctrl-C goes to the run's own group.
    os.posix_spawn(sys.executable, argv, os.environ, setpgroup=0)


def main() -> None:
    """Wait for the end of the run, then end what is left of it."""
    run = int(sys.argv[1])
    while os.getppid() == run:
        time.sleep(_PERIOD_S)
    # What is about to end may start processes: an `up` its daemons.
    quiet_scans = 0
    for _ in range(_SCANS):
        processes = list(left_behind())
        quiet_scans = 0 if processes else quiet_scans + 1
        if quiet_scans == _QUIET_SCANS:
            break
        for process in processes:
            with suppress(psutil.Error):
                process.terminate()
        for process in psutil.wait_procs(processes, timeout=_GRACE_S)[1]:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(_PERIOD_S)


def left_behind() -> Iterator[psutil.Process]:
    """Yield the processes of this run but this one."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_ours = process.environ().get(_RUN) == os.environ[_RUN]
            if is_ours and process.pid != os.getpid():
                yield process


if __name__ == "__main__":
    main()
