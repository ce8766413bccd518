"""No test leaves a process behind, also when the run is killed."""

import subprocess
import sys
from contextlib import suppress

import psutil

_PROGRAM = """
import signal, subprocess, sys, time
def start_another(*_):
    time.sleep(0.2)
    subprocess.Popen(["sleep", "600.125"], start_new_session=True)
    sys.exit()
signal.signal(signal.SIGTERM, start_another)
print("ready", flush=True)
time.sleep(600)
"""
# As a run of tests that started a program in a session of its own, which starts another one when it ends.
_RUN = f"""
import os, subprocess, sys
os.environ.pop("FLEET_TEST_RUN", None)
from tests.support import reaper
reaper.start()
print(os.environ["FLEET_TEST_RUN"], flush=True)
program = {_PROGRAM!r}
child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def processes_of(mark: str) -> list[psutil.Process]:
    """Return the processes that have the mark of a run in their environment."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get("FLEET_TEST_RUN") == mark:
                processes.append(process)
    return processes


def test_a_killed_run_leaves_no_process() -> None:
    run = subprocess.Popen([sys.executable, "-c", _RUN], stdout=subprocess.PIPE)
    try:
        assert run.stdout is not None
        mark = run.stdout.readline().decode().strip()
        child = psutil.Process(int(run.stdout.readline()))
    finally:
        run.kill()
        run.communicate()
    assert psutil.wait_procs([child], timeout=30)[0] == [child]
    # The reaper is the last process of the run.
    assert psutil.wait_procs(processes_of(mark), timeout=60)[1] == []
    assert processes_of(mark) == []
