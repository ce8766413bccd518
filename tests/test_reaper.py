"""No test leaves a process behind, also when the run is killed."""

import subprocess
import sys

import psutil

# As a run of tests that started a program in a session of its own.
_RUN = """
import os, subprocess, sys
os.environ.pop("FLEET_TEST_RUN", None)
from tests.support import reaper
reaper.start()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_killed_run_leaves_no_process() -> None:
    run = subprocess.Popen([sys.executable, "-c", _RUN], stdout=subprocess.PIPE)
    try:
        assert run.stdout is not None
        child = psutil.Process(int(run.stdout.readline()))
    finally:
        run.kill()
        run.communicate()
    assert psutil.wait_procs([child], timeout=30)[0] == [child]
