"""Time of `fleetctl` from the shell's Enter to its last letter: get, --help, a typo; processes from scratch.

Beside them, in turns with them, so that a machine that is busy with something else is so for all: Python doing
nothing, Python importing click (less than that no command built with it can take), and `kubectl version --client`
where there is a kubectl. The store is warm and holds a hundred ModelDeployments; `full` is the same get by way of gRPC
and typed objects, as every other verb reads.

    python -m bench.cli [--rounds 30]

The last line is JSON: first the ratios, which depend least on the machine, then milliseconds (median, least, and
processor time, of which other processes take nothing).
"""

import argparse
import asyncio
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.result import arguments, finish, sized
from tests.support.fleet import Fleet

MANIFEST = (
    "apiVersion: fleet/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: model-{number}}}\n"
    "spec: {{model: {{path: tiny}}, contextLength: 512}}\n"
)
_FULL = (
    "import asyncio, sys\n"
    "from fleetctl.objects import reader\n"
    "from fleetctl.output import printers\n"
    "from fleetctl.objects.kind_args import kind_of\n"
    "from machinery.clock import SystemClock\n"
    "from store.etcd.address import EtcdAddress\n"
    "from store.etcd.connect import connect\n"
    "from pathlib import Path\n"
    "async def main():\n"
    "    transport = connect(EtcdAddress(socket=Path(sys.argv[1])))\n"
    "    found = await reader.read(transport, kind_of('md'), ())\n"
    "    context = await reader.table_context(transport, SystemClock(), kind_of('md'))\n"
    "    await transport.close()\n"
    "    print(printers.table(found, context, is_wide=False))\n"
    "asyncio.run(main())\n"
)


def commands(fleetctl: str, socket: str) -> dict[str, Sequence[str]]:
    """Return what is measured."""
    etcd = ("--etcd", f"unix:{socket}")
    found: dict[str, Sequence[str]] = {
        "python": (sys.executable, "-c", "pass"),
        "click": (sys.executable, "-c", "import click"),
        "get": (fleetctl, "get", "md", *etcd),
        "get_one_yaml": (fleetctl, "get", "md/model-7", "-o", "yaml", *etcd),
        "get_jsonpath": (fleetctl, "get", "md", "-o", "jsonpath={..name}", *etcd),
        "help": (fleetctl, "--help"),
        "typo": (fleetctl, "gte", "md"),
        "full": (sys.executable, "-c", _FULL, socket),
    }
    kubectl = shutil.which("kubectl")
    return {**found, "kubectl": (kubectl, "version", "--client")} if kubectl else found


def timed(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Run a command; return its milliseconds, and the processor's."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, env=environment, check=False, timeout=120)
    took = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if b"Traceback" in done.stderr:
        raise SystemExit(f"{command} failed: {done.stderr.decode()}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took * 1000, cpu * 1000


def measured(
    found: Mapping[str, Sequence[str]], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Run everything in turns; the first round warms up the disk's cache and Python's."""
    # Compiled code is kept, as it is on a user's machine.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name, command in found.items():
            once = timed(command, environment)
            if number:
                times[name].append(once)
    return times


def summary(times: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Return ratios first, then figures."""
    median = {name: statistics.median(wall for wall, _ in all_) for name, all_ in times.items()}
    cpu = {name: statistics.median(cpu for _, cpu in all_) for name, all_ in times.items()}
    least = {name: min(wall for wall, _ in all_) for name, all_ in times.items()}
    ratios = {
        f"{name}_over_{base}": round(median[name] / median[base], 2)
        for name, base in (
            ("get", "python"),
            ("get", "click"),
            ("get", "kubectl"),
            ("full", "get"),
            ("help", "python"),
            ("typo", "python"),
        )
        if base in median
    }
    return {
        **ratios,
        "ms_median": {name: round(value, 1) for name, value in median.items()},
        "ms_least": {name: round(value, 1) for name, value in least.items()},
        "ms_cpu_median": {name: round(value, 1) for name, value in cpu.items()},
        "rounds": len(next(iter(times.values()))),
        "load": round(os.getloadavg()[0], 1),
    }


async def main(rounds: int) -> None:
    """Fill a store, measure, print."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder) / "fleet", Path(folder) / "models")
        await fleet.etcd.start()
        try:
            await fleet.applied("---\n".join(MANIFEST.format(number=n) for n in range(100)))
            fleetctl = str(Path(sys.executable).with_name("fleetctl"))
            found = commands(fleetctl, str(fleet.etcd.address.socket))
            result = summary(await asyncio.to_thread(measured, found, rounds))
        finally:
            await fleet.stop()
    for name, value in result["ms_median"].items():
        print(f"{name:>14} {value:8.1f} ms   processor {result['ms_cpu_median'][name]:8.1f} ms")
    compared = {name: value for name, value in result.items() if "_over_" in name}
    figures = {name: value for name, value in result.items() if name not in compared}
    failed = {} if "kubectl" in found else {"kubectl": "not on PATH"}
    finish("cli", compared, figures, failed=failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=sized(30, smoke=1))
    asyncio.run(main(parser.parse_args(arguments()).rounds))
