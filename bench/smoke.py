"""Every bench for seconds: whether it runs from a fresh clone and compares something. `make bench-smoke`.

`python -m bench.smoke store shard` runs some of them. Figures of so short a run mean nothing.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from bench.harness import ROOT

_RECIPE = re.compile(r"^bench-([a-z-]+):.*\n\t@\$\(BIN\)/python -m (\S+)", re.MULTILINE)
BENCHES = dict(_RECIPE.findall((ROOT / "Makefile").read_text()))
"""Modules by the name of their target in the Makefile, without `bench-`."""
del BENCHES["smoke"]
_LIMIT_S = 600.0


def run(name: str) -> str:
    """Run one bench; return what is wrong with it, "" if nothing."""
    command = [sys.executable, "-m", BENCHES[name], "--smoke"]
    # In a session of its own, so that what it started can be ended with it.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"not done within {_LIMIT_S:.0f} s"
    return fault(process.returncode, output)


def fault(code: int, output: str) -> str:
    """Return what is wrong with a bench by its exit code and its output, "" if nothing."""
    lines = output.strip().splitlines()
    if code != 0:
        return f"exit code {code}: " + " | ".join(lines[-3:])
    try:
        last = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        return "its last line is not JSON"
    if (
        not isinstance(last, dict)
        or "bench" not in last
        or not isinstance(last.get("failed"), dict)
    ):
        return "its last line does not say which bench it is and which peers failed"
    for peer, reason in last["failed"].items():
        print(f"  without {peer}: {reason}", flush=True)
    return ""


def main(names: Sequence[str]) -> None:
    """Run the benches; exit with an error if one does not work."""
    unknown = sorted(set(names) - BENCHES.keys())
    if unknown:
        sys.exit(f"there is no bench {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    broken = []
    for name in names or BENCHES:
        began_s = time.monotonic()
        why = run(name)
        broken += [name] if why else []
        print(f"{name:20} {time.monotonic() - began_s:6.1f} s  {why or 'ok'}", flush=True)
    if broken:
        sys.exit(f"{len(broken)} benches do not work: {', '.join(broken)}")


if __name__ == "__main__":
    main(sys.argv[1:])
