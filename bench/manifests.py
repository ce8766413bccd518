"""10,000 manifests: seconds and memory to read, check and compare them, with the YAML library's share apart.

Beside it, on the same files in the same run: PyYAML's C loader, and ruamel's round-trip loader, which build values and
check nothing (what takes minutes is reckoned from the first 2,000). Each row is a process of its own, because memory that one part has taken is not given back for the next.

`python -m bench.manifests [COUNT]`; `one_file_each` is how `fleetctl export` and repositories lay them out.
"""

import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml
from ruamel.yaml import YAML

from bench.result import arguments, finish, sized
from machinery.clock import SystemClock
from machinery.gc_pause import pause_collection
from manifests import load
from manifests.load import load_objects
from manifests.observe import observe
from manifests.trees import key_of
from manifests.validate import validate
from manifests.yaml import parser
from reconciler.gitops.fetch_messages import document_of, line_of
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd

COUNT = sized(10_000, smoke=200)
# A file may have 4 MiB and so many values; 1,000 deployments like these are well below both.
PER_FILE = sized(1_000, smoke=50)
# What reads a whole tree with the places of all values takes minutes: of that, a few files are read, and the rest reckoned.
SLOW_FILES = 2
SLOW = ("events, ruamel (pure Python)", "values, ruamel round-trip")
# What a day's work changes of a large repository.
CHANGED_EVERY = 100

_MANIFEST = """\
# What team {team} asks of the fleet; see docs/operations/models.md.
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata:
  name: model-{number:05} # clients may use this name
  labels:
    team: team-{team}
    tier: "{tier}"
  annotations:
    owner: "team-{team}@example.com"
spec:
  model:
    path: ./mlx-community/Qwen2.5-{tier}B-Instruct-4bit
  servedNames:
  - qwen-{number:05}
  - fast-{team}
  replicas: {replicas}
  contextLength: 8192 # tokens
  concurrency: 4
  placement:
    nodeSelector:
      fleet/os: macOS
    profile: Balanced
    maxReplicasPerNode: 1
  priority: 10
  minAvailable: 0
  rollout:
    maxSurge: 1
    maxUnavailable: 0
    progressDeadline: 15m
  routing:
    strategy: Scored
    sessions: {{enabled: true, ttl: 5m}}
"""


def manifest(number: int, replicas: int = 0) -> str:
    """Return a deployment as people write them: 33 lines, 800 bytes, 30 values."""
    return _MANIFEST.format(
        number=number, team=number % 40, tier=(3, 7, 14)[number % 3], replicas=replicas
    )


def write(root: Path, count: int) -> None:
    """Write the same deployments twice: many in a file, and one file each; some changed; and the first few files alone."""
    (root / "few").mkdir()
    for start in range(0, min(count, SLOW_FILES * PER_FILE), PER_FILE):
        part = [manifest(n) for n in range(start, min(count, start + PER_FILE))]
        (root / "few" / f"{start:05}.yaml").write_text("---\n".join(part))
    for name, step in (("together", 0), ("changed", CHANGED_EVERY)):
        folder = root / name
        folder.mkdir()
        texts = [manifest(n, int(bool(step) and n % step == 0)) for n in range(count)]
        for start in range(0, count, PER_FILE):
            part = texts[start : start + PER_FILE]
            (folder / f"{start:05}.yaml").write_text("---\n".join(part))
    overlay(root / "site", count)
    folder = root / "one_file_each"
    folder.mkdir()
    for number in range(count):
        (folder / f"model-{number:05}.yaml").write_text(manifest(number))


def overlay(folder: Path, count: int) -> None:
    """Write an overlay of all of them, with patches for those that a site changes."""
    folder.mkdir()
    head = "apiVersion: fleet/v1alpha1\nkind: "
    (folder / "overlay.yaml").write_text(f"{head}Overlay\nbase: [../together]\n")
    patches = [
        f"{head}ModelDeployment\nmetadata: {{name: model-{n:05}}}\nspec: {{replicas: 3}}\n"
        for n in range(0, count, CHANGED_EVERY)
    ]
    (folder / "patches.yaml").write_text("---\n".join(patches))


def texts(root: Path) -> Iterator[str]:
    for path in sorted(root.iterdir()):
        yield path.read_text()


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


def drained(items: Iterator[object]) -> None:
    for _ in items:
        pass


def events_of_ruamel(root: Path) -> None:
    for text in texts(root):
        drained(iter(YAML(typ="safe", pure=True).parse(text)))


def events_of_libyaml(root: Path) -> None:
    for text in texts(root):
        drained(yaml.parse(text, Loader=yaml.CSafeLoader))


def load_of_pyyaml(root: Path) -> object:
    return [list(yaml.load_all(text, Loader=yaml.CSafeLoader)) for text in texts(root)]


def load_of_ruamel(root: Path) -> object:
    return [list(YAML(typ="rt", pure=True).load_all(text)) for text in texts(root)]


def our_nodes(root: Path) -> object:
    return [parser.parse(text, "a file") for text in texts(root)]


def our_trees(root: Path) -> object:
    return [parser.parse_values(text) for text in texts(root)]


def our_load(root: Path) -> object:
    return load_objects([str(root)])


def our_overlay(root: Path) -> object:
    return load_objects([str(root.parent / "site")])


def our_commit(root: Path) -> object:
    """Read the overlay as a GitSource does: parsed by the fetch process, sent with all places, typed by the leader."""
    with pause_collection():
        found = load.parse_texts([(path.name, path.read_text()) for path in sorted(root.iterdir())])
        lines = [line_of(one).encode() for one in found.documents]
        return load.read_objects([document_of(line) for line in lines])


PARTS: dict[str, Callable[[Path], object]] = {
    "events, ruamel (pure Python)": events_of_ruamel,
    "events, libyaml (C)": events_of_libyaml,
    "values, PyYAML CSafeLoader": load_of_pyyaml,
    "values, ruamel round-trip": load_of_ruamel,
    "ours: values without places": our_trees,
    "ours: values with places": our_nodes,
    "ours: typed and checked": our_load,
    "ours: an overlay of them": our_overlay,
    "ours: a commit of them": our_commit,
}


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Return the seconds (on the clock, and of the processor) and how much the process grew at most, in MiB."""
    before, began, used = peak_bytes(), time.perf_counter(), time.process_time()
    kept = work()
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    del kept
    grown = (peak_bytes() - before) / 2**20
    return {"seconds": round(seconds, 2), "cpu": round(cpu, 2), "mib": round(grown)}


def apart(*words: str) -> dict[str, float]:
    """Run a part in a process of its own; return what it measured."""
    argv = [sys.executable, "-m", "bench.manifests", *words]
    read, write_end = os.pipe()
    pid = os.posix_spawn(
        sys.executable, argv, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write_end, 1)]
    )
    os.close(write_end)
    with os.fdopen(read) as output:
        said = output.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, words
    found: dict[str, float] = json.loads(said)
    return found


async def against_store(root: Path, address: EtcdAddress) -> dict[str, float]:
    """Return the seconds of looking at the store and of the checks across objects, of manifests loaded before."""
    loaded = load_objects([str(root)])
    transport = connect(address)
    try:
        began = time.perf_counter()
        seen = await observe(transport, [key_of(item.obj) for item in loaded])
        observed = time.perf_counter()
        assert not validate(loaded, seen.known)
        checked = time.perf_counter()
    finally:
        await transport.close()
    return {"observe": round(observed - began, 2), "across": round(checked - observed, 2)}


def command(verb: str, root: Path, etcd: str, *, code: int) -> dict[str, float]:
    """Return what the whole command takes, interpreter and all."""
    argv = [sys.executable, "-m", "fleetctl", verb, "-f", str(root), "--etcd", etcd]
    began = time.perf_counter()
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    _, status, used = os.wait4(
        os.posix_spawn(sys.executable, argv, os.environ, file_actions=quiet), 0
    )
    assert os.waitstatus_to_exitcode(status) == code, (verb, status)
    peak = used.ru_maxrss if sys.platform == "darwin" else used.ru_maxrss * 1024
    cpu = used.ru_utime + used.ru_stime
    took = time.perf_counter() - began
    return {"seconds": round(took, 2), "cpu": round(cpu, 2), "mib": round(peak / 2**20)}


async def commands(root: Path) -> dict[str, dict[str, float]]:
    """Return what fleetctl takes with all of it in a store."""
    etcd = EmbeddedEtcd(locate(None), root / "etcd", SystemClock())
    await etcd.start()
    address = str(etcd.address)
    try:
        found = {
            "fleetctl apply, all new": command("apply", root / "together", address, code=0),
            "fleetctl apply, unchanged": command("apply", root / "together", address, code=0),
            "fleetctl diff, unchanged": command("diff", root / "together", address, code=0),
            "fleetctl diff, 1 % changed": command("diff", root / "changed", address, code=1),
            "fleetctl diff, one file each": command(
                "diff", root / "one_file_each", address, code=0
            ),
        }
        inside = await asyncio.to_thread(apart, "inside", str(root / "changed"), address)
    finally:
        await etcd.supervisor.stop()
    return {
        **found,
        "of it, reading the store": {"seconds": inside["observe"]},
        "of it, checks across objects": {"seconds": inside["across"]},
    }


def part(name: str, root: Path, count: int) -> dict[str, float]:
    """Return what one part takes for all; of slow ones, reckoned from the first few files."""
    if name not in SLOW:
        return apart("part", name, str(root / "together"))
    found = apart("part", name, str(root / "few"))
    times = count / min(count, SLOW_FILES * PER_FILE)
    return {key: round(value * times, 2) for key, value in found.items()}


def ratios(rows: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return what depends least on the machine: seconds over seconds."""
    ours, diff = rows["ours: typed and checked"], rows["fleetctl diff, 1 % changed"]
    pairs = {
        "load_over_pyyaml_c": (ours, rows["values, PyYAML CSafeLoader"]),
        "ruamel_round_trip_over_load": (rows["values, ruamel round-trip"], ours),
        "yaml_of_load": (rows["ours: values without places"], ours),
        "libyaml_of_diff": (rows["events, libyaml (C)"], diff),
        "overlay_over_load": (rows["ours: an overlay of them"], ours),
        "commit_over_load": (rows["ours: a commit of them"], ours),
        "diff_over_pyyaml_c": (diff, rows["values, PyYAML CSafeLoader"]),
        "store_of_diff": (rows["of it, reading the store"], diff),
    }
    return {
        name: round(above["seconds"] / max(below["seconds"], 0.01), 3)
        for name, (above, below) in pairs.items()
    }


def measure(root: Path, count: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield what was measured, as soon as it was."""
    write(root, count)
    yield (
        "ours: the same, one file each",
        apart("part", "ours: typed and checked", str(root / "one_file_each")),
    )
    for name in reversed(PARTS):
        if name.startswith("ours"):
            yield name, part(name, root, count)
    yield from asyncio.run(commands(root)).items()
    for name in PARTS:
        if not name.startswith("ours"):
            yield name, part(name, root, count)


def main(words: list[str]) -> None:
    """Measure and print, or measure one part in this process."""
    match words:
        case ["part", name, folder]:
            print(json.dumps(timed(lambda: PARTS[name](Path(folder)))))
            return
        case ["inside", folder, etcd]:
            address = EtcdAddress(socket=Path(etcd.removeprefix("unix:")))
            print(json.dumps(asyncio.run(against_store(Path(folder), address))))
            return
        case _:
            count = int(words[0]) if words else COUNT
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as root:
        for name, row in measure(Path(root), count):
            rows[name] = row
            more = f"{row['cpu']:>8.2f} s of CPU {row['mib']:>6} MiB" if "mib" in row else ""
            print(f"{name:34}{row['seconds']:>8.2f} s {more}", flush=True)
    finish("manifests", ratios(rows), {"objects": count, "rows": rows})


if __name__ == "__main__":
    main([*arguments()])
