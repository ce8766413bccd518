"""Files and functions of production code that run for an apply, a chat request, and the loss of a node.

A reader who follows one of them opens about these files. Every process of a real fleet records the functions that it
calls, module bodies left out; what its loops do meanwhile is among them. The files of one reconcile of one key alone are
counted by tests/reconciler/test_reconcile.py.

`python -m bench.walks [TREE]` measures this tree, or another checkout with its own virtual environment.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench.harness import arguments, finish

_FIRST_SIGNAL: int = getattr(signal, "SIGRTMIN", 0)
"""Linux has signals for free use, and /proc."""
_RESET, _DUMP = _FIRST_SIGNAL + 5, _FIRST_SIGNAL + 6
_LIMIT_S = 90.0
_PACKAGES = frozenset(
    [
        "schemas",
        "machinery",
        "store",
        "models",
        "manifests",
        "reconciler",
        "nodeagent",
        "engine",
        "gateway",
        "fleetctl",
    ]
)

# Loaded by every Python process of the measured fleet, whatever tree it runs.
_RECORDER = """
import json, os, signal, sys, threading
folder, root = os.environ["WALK_FOLDER"], os.environ["WALK_TREE"] + os.sep
seen = set()
def record(frame, event, argument):
    code = frame.f_code
    # 0x1 marks a function: the bodies of modules and classes run once, at import.
    if event == "call" and code.co_flags & 1 and code.co_filename.startswith(root):
        seen.add(code.co_filename[len(root):] + " " + code.co_qualname)
def dump(*_):
    path = os.path.join(folder, str(os.getpid()))
    with open(path + ".new", "w") as file:
        json.dump({"argv": sys.orig_argv, "functions": sorted(seen)}, file)
    os.replace(path + ".new", path)
signal.signal(signal.SIGRTMIN + 5, lambda *_: seen.clear())
signal.signal(signal.SIGRTMIN + 6, dump)
threading.setprofile(record)
sys.setprofile(record)
import atexit
atexit.register(dump)
"""

_MANIFEST = """\
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: walk}
spec: {model: {path: tiny}, contextLength: 512}
"""


class RecordedFleet:
    """A fleet of two nodes whose processes record the files of the functions that they call."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree, self.folder = tree, folder
        self.records = folder / "records"
        self.records.mkdir()
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(_RECORDER)
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{site}:{tree}",
            "WALK_FOLDER": str(self.records),
            "FLEETCTL_CONFIG": str(folder / "fleetctl.toml"),
            "WALK_TREE": str(tree),
        }
        self.python = str(tree / ".venv" / "bin" / "python")
        self.data = folder / "data"

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [self.python, *words], cwd=self.tree, env=self.environment,
            capture_output=True, text=True, timeout=_LIMIT_S * 2, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} failed: {done.stderr}{done.stdout}")
        return done.stdout

    def fleetctl(self, *words: str) -> str:
        return self.run("-m", "fleetctl", *words)

    def pids(self) -> dict[int, str]:
        """Return the fleet's Python processes with their modules."""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                variables = (entry / "environ").read_bytes()
                if f"WALK_FOLDER={self.records}".encode() in variables and "-m" in argv:
                    found[int(entry.name)] = argv[argv.index("-m") + 1]
        return found

    def reset(self) -> None:
        for path in self.records.iterdir():
            path.unlink()
        for pid in self.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, _RESET)

    def functions(self) -> dict[str, set[str]]:
        """Return the functions that ran since the last reset, each with its file, by the first package of the process."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, _DUMP)
        time.sleep(1.5)
        by_process: dict[str, set[str]] = {}
        for path in self.records.iterdir():
            record = json.loads(path.read_text())
            argv = record["argv"]
            module = argv[argv.index("-m") + 1] if "-m" in argv else "other"
            production = {name for name in record["functions"] if name.split("/")[0] in _PACKAGES}
            by_process.setdefault(module, set()).update(production)
        return by_process


@contextlib.contextmanager
def recorded_fleet(tree: Path) -> Iterator[RecordedFleet]:
    """Run a fleet of two nodes with a tiny model."""
    with tempfile.TemporaryDirectory() as name:
        fleet = RecordedFleet(tree, Path(name))
        models = Path(name) / "models"
        fleet.run("-m", "tests.support.tiny_model", str(models / "tiny"), "--endless")
        try:
            fleet.fleetctl(
                *("up", "--nodes", "2", "--detach", "--data-dir", str(fleet.data)),
                *("--models-dir", str(models), "--port", "14980", "--engine-port", "14000"),
                *("--agent-port", "14900", "--node-grace-period", "2"),
            )
            yield fleet
        finally:
            fleet.fleetctl("down", "--data-dir", str(fleet.data))


def chat() -> dict[str, object]:
    body = {
        "model": "walk",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8,
        "stream": True,
    }
    request = urllib.request.Request(
        "http://127.0.0.1:14980/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
        answer.read()
        return {"node": answer.headers["x-fleet-node"]}


def until_chat_works() -> dict[str, object]:
    end = time.monotonic() + _LIMIT_S
    while True:
        try:
            return chat()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.3)


def kill_node(fleet: RecordedFleet, node: str) -> None:
    """Kill the agent of a node and its engines, as a power cut would."""
    for pid in fleet.pids():
        with contextlib.suppress(OSError):
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if node in argv or any(f"/{node}/" in word for word in argv):
                os.kill(pid, signal.SIGKILL)


def measure(tree: Path) -> dict[str, int]:
    """Return the number of files and functions that each walk passes."""
    walks: dict[str, set[str]] = {}
    with recorded_fleet(tree) as fleet:
        manifest = fleet.folder / "walk.yaml"
        manifest.write_text(_MANIFEST)
        fleet.reset()
        fleet.fleetctl("apply", "-f", str(manifest), "--data-dir", str(fleet.data))
        until_chat_works()
        ran = fleet.functions()
        walks["apply_to_engine_ready"] = set().union(
            *(names for module, names in ran.items() if module != "gateway")
        )
        walks["apply_in_fleetctl"] = ran.get("fleetctl", set())
        for _ in range(3):
            chat()
        fleet.reset()
        node = str(chat()["node"])
        ran = fleet.functions()
        walks["chat_request_in_gateway"] = ran.get("gateway", set())
        walks["chat_request"] = walks["chat_request_in_gateway"] | ran.get("engine", set())
        fleet.reset()
        kill_node(fleet, node)
        time.sleep(6)
        until_chat_works()
        walks["lost_node_to_replacement"] = fleet.functions().get("reconciler", set())
    figures: dict[str, int] = {}
    for name, functions in walks.items():
        figures[f"{name}_files"] = len({function.partition(" ")[0] for function in functions})
        figures[f"{name}_functions"] = len(functions)
        if "--list" in sys.argv:
            print(name, *sorted(functions), sep="\n  ")
    return figures


def main() -> None:
    if not _FIRST_SIGNAL:
        sys.exit("bench walks: it follows processes by /proc, so it runs on Linux only")
    given = [word for word in arguments() if not word.startswith("--")]
    tree = Path(given[0] if given else Path(__file__).parent.parent).resolve()
    finish("walks", measure(tree), {})


if __name__ == "__main__":
    main()
