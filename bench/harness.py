"""Harness of every bench: sizes, turns that alternate, processes with their cost, peers in folders of their own, the last line.

The last line of a bench is one JSON object: what it compared first, then `failed` (the peers that could not be measured,
with the reason), then other figures and the state of the machine. A bench that compared nothing exits with an error.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

T = TypeVar("T")

ROOT: Final = Path(__file__).parent.parent
_FLAG = "--smoke"
SMOKE: Final = _FLAG in sys.argv[1:]
"""True in a smoke test: whether the bench runs and compares, in seconds. Its figures mean nothing."""
PEERS: Final = Path(os.environ.get("FLEET_BENCH_PEERS", "~/.cache/mlx-fleet-bench")).expanduser()
"""Folder of the installed peers, each in a folder of its own."""
_INSTALL_S, _READY_S = 900.0, 120.0
_BEGAN_S = time.monotonic()
_LOAD_BEFORE = round(os.getloadavg()[0], 2)


def sized(full: T, *, smoke: T) -> T:
    """Return a size of the bench: `full`, or `smoke` in a smoke test."""
    return smoke if SMOKE else full


def arguments() -> Sequence[str]:
    """Return the arguments of the command line without the flag for a smoke test."""
    return [word for word in sys.argv[1:] if word != _FLAG]


class PeerError(Exception):
    """A peer could not be measured; the message says why."""


@contextmanager
def recorded(failed: dict[str, str], peer: str) -> Iterator[None]:
    """Record under the peer's name why it could not be measured; the bench goes on without it."""
    try:
        yield
    except PeerError as error:
        failed[peer] = str(error)
        print(f"{peer}: not measured: {error}", flush=True)


@contextmanager
def of_peer() -> Iterator[None]:
    """Turn whatever a peer raises into a PeerError."""
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        raise PeerError(f"{type(error).__name__}: {error}") from error


def turns(rounds: int, contenders: Sequence[T]) -> Iterator[tuple[int, T]]:
    """Yield each contender once a round, in alternating order, so that a busy moment hits all alike."""
    for number in range(rounds):
        for contender in contenders if number % 2 else reversed(contenders):
            yield number, contender


@dataclass(frozen=True)
class Spread:
    """A figure of several rounds: the median, the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        rounds = sorted(values)
        return cls(statistics.median(rounds), rounds[0], rounds[-1])

    def as_json(self) -> dict[str, float]:
        return {
            name: round(getattr(self, name), 2 if self.median < 100 else 0)
            for name in ("median", "low", "high")
        }


def install(name: str, *command: str) -> Path:
    """Run an installation of a peer once, in its folder; `{folder}` in the command is that folder, which is returned.

    Raises:
        PeerError: it failed; with its last line.

    """
    folder = PEERS / name
    if (folder / "ready").exists():
        return folder
    if SMOKE:
        raise PeerError("not installed (a run without --smoke installs it)")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"installing {name} into {folder}", flush=True)
    words = [word.format(folder=folder) for word in command]
    with of_peer():
        done = subprocess.run(
            words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=_INSTALL_S, check=False,
        )  # fmt: skip
    if done.returncode:
        lines = done.stdout.strip().splitlines() or [""]
        raise PeerError(f"`{' '.join(command[:4])} ...` failed: {lines[-1]}")
    (folder / "ready").touch()
    return folder


@contextmanager
def own_core(*, is_measured: bool) -> Iterator[None]:
    """Let what is started meanwhile run on the core of what is measured, or on the others; Linux, with two cores or more."""
    if sys.platform == "linux":
        cores = os.sched_getaffinity(0)
        last = {max(cores)}
        os.sched_setaffinity(0, last if is_measured else (cores - last or cores))
        try:
            yield
        finally:
            os.sched_setaffinity(0, cores)
    else:
        yield


@asynccontextmanager
async def child(
    *command: str, log: Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Run a program; end it and all of its processes."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, cwd=cwd, stdout=output, stderr=output, env=env)  # noqa: ASYNC220 - nothing else runs yet
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes], *, patience_s: float = 5.0) -> None:
    """End a process and all that it started."""
    started = tree(process.pid)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    for each in started:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def tree(pid: int | None) -> list[psutil.Process]:
    """Return the process and all that it started."""
    try:
        process = psutil.Process(pid) if pid is not None else None
        return [process, *process.children(recursive=True)] if process is not None else []
    except psutil.NoSuchProcess:
        return []


def cpu_s(pid: int | None) -> float:
    """Return the seconds of processor, user and system, that the process and its children took so far."""
    total = 0.0
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess, OSError):
            if sys.platform == "linux":
                # The clock of the process, to the nanosecond: /proc counts in ticks of 10 ms. Linux derives its
                # number from the pid (MAKE_PROCESS_CPUCLOCK of its headers, with CPUCLOCK_SCHED).
                total += time.clock_gettime((~process.pid << 3) | 2)
            else:
                total += float(sum(process.cpu_times()[:2]))
    return total


def rss_mb(pid: int | None) -> float:
    """Return the memory that the process and its children hold, in megabytes."""
    total = 0
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return round(total / 1e6, 1)


def get(port: int, path: str, timeout_s: float = 2.0) -> bytes:
    """Return the body of a GET. Raises OSError."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout_s) as response:
        return bytes(response.read())


async def until_answers(port: int, path: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a GET is answered with success.

    Raises:
        RuntimeError: the process ended, or it does not answer in time; with the end of its log.

    """
    until_s = time.monotonic() + _READY_S
    while True:
        try:
            await asyncio.to_thread(get, port, path)
        except OSError as error:
            if process.poll() is not None or time.monotonic() > until_s:
                lines = log.read_text(errors="replace").strip().splitlines()
                reason = f"port {port}{path}: {error}; its log ends: {' | '.join(lines[-2:])}"
                raise RuntimeError(reason) from error
            await asyncio.sleep(0.05)
        else:
            return


def finish(
    bench: str,
    compared: Mapping[str, Any],
    figures: Mapping[str, Any],
    *,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Print the last line, and exit with an error if nothing was compared.

    Raises:
        SystemExit: nothing was compared.

    """
    failed = dict(failed or {})
    machine = {
        "seconds": round(time.monotonic() - _BEGAN_S),
        "cores": os.cpu_count(),
        "load_average_before": _LOAD_BEFORE,
    }
    assert not {"bench", "failed", *machine} & {*compared, *figures}, "names of the harness"
    print(json.dumps({"bench": bench, **compared, "failed": failed, **figures, **machine}))
    if not any(value is not None for value in compared.values()):
        why = "; ".join(f"{peer}: {reason}" for peer, reason in failed.items())
        sys.exit(f"bench {bench}: nothing was compared ({why or 'no figures'})")
