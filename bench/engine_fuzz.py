"""Hostile clients of one real engine, and what a well-behaved neighbour notices: `make fuzz-engine`, in five minutes.

The model is small, with random weights.

First the neighbour alone: a chat after the other, and the time to its first token. Then the same beside the corpus
(engine_fuzz_corpus.py) and 10,000 generated requests, spread over three minutes. The clients get the CPU that is left,
because those of a fleet run on other machines. What must hold: no answer of 500, the neighbour's p99 below twice its quiet
value, the memory of the engine and its workers within the memory proof, and an idle engine at the end.
"""

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from bench import engine_fuzz_corpus as corpus
from bench.engine_fuzz_corpus import HostileRequest
from bench.harness import arguments, finish, sized
from bench.servers import Server, serving, start_ours, tiny_model
from models import model_files
from reconciler.placement import memory_proof

_NEIGHBOUR: Final = "--neighbour"
_QUIET_S = sized(30.0, smoke=3.0)
_SPREAD_S = sized(150.0, smoke=5.0)
_GENERATED = sized(10_000, smoke=100)
_GENERATED_EACH = 30
_SETTLE_S = 30.0
_ATTACKERS = 4
_CONTEXT, _CONCURRENCY = 4096, 8
_SEED = 20261123
# Answers that a client may get whose request is not to blame: its worker was lost, or its time was over.
_EXCUSED: Final = (503, 504)
_LOOK_S = 0.2
_NICENESS = 10


@dataclass(slots=True)
class Outcomes:
    """Answers to the attackers."""

    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, request: HostileRequest, status: int, body: bytes) -> None:
        with self.lock:
            self.sent += 1
            self.answers[str(status) if status else request.client] += 1
            if status >= 500 and status not in _EXCUSED and len(self.faults) < 20:
                self.faults.append(
                    f"{request.name}: {status} {body[:300]!r} to {request.body[:300]!r}"
                )


@dataclass(slots=True)
class MemoryWatch:
    """The most memory of an engine and its workers; pages that they share count once on Linux."""

    pid: int
    peak_bytes: int = 0
    _end: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._end.wait(_LOOK_S):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(self.pid)
                family = [process, *process.children(recursive=True)]
                self.peak_bytes = max(self.peak_bytes, sum(map(_held, family)))

    def stop(self) -> None:
        self._end.set()


def _held(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        found: Any = process.memory_full_info()
        return int(getattr(found, "pss", found.rss))
    return 0


def neighbour(port: int) -> None:
    """Chat until killed; print the seconds to each first token."""
    body = {"model": corpus.MODEL, "max_tokens": 4, "stream": True, "temperature": 0}
    for count in itertools.count():
        turn = {"role": "user", "content": f"What comes after {count}?"}
        raw = json.dumps(body | {"messages": [turn]}).encode()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        began = time.perf_counter()
        try:
            connection.request("POST", corpus.CHAT, raw, {"content-type": "application/json"})
            response = connection.getresponse()
            response.readline()
            taken = time.perf_counter() - began
            response.read()
            print(taken if response.status == 200 else -response.status, flush=True)
        except OSError:
            print(-1, flush=True)
        finally:
            connection.close()
        time.sleep(0.02)


@contextlib.contextmanager
def neighbouring(port: int, found: list[float]) -> Iterator[None]:
    """Run the neighbour in a process of its own; its times are in `found` at the end."""
    command = [sys.executable, "-m", "bench.engine_fuzz", _NEIGHBOUR, str(port)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        try:
            yield
        finally:
            process.kill()
            process.wait()
            output.seek(0)
            found += [float(line) for line in output.read().split()]


def send(port: int, request: HostileRequest, outcomes: Outcomes) -> None:
    """Send one request as its client does."""
    head = (
        f"POST {request.path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(request.body)}\r\nconnection: close\r\n\r\n"
    )
    status, body = 0, b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=120) as line:
            half = len(request.body) // 2
            sent = request.body[:half] if request.client == "stalls" else request.body
            line.sendall(head.encode() + sent)
            if request.client == "waits":
                response = http.client.HTTPResponse(line)
                response.begin()
                status, body = response.status, response.read()
            else:
                time.sleep(1.0 if request.client == "stalls" else 0.01)
    except (OSError, http.client.HTTPException):
        pass  # an engine may close a connection whose body it refuses
    outcomes.add(request, status, body)


def hostile_requests() -> Iterator[HostileRequest]:
    """Yield a request of the corpus, then thirty generated ones, and so on."""
    made = corpus.generated(_SEED)
    for request in itertools.cycle(list(corpus.corpus())):
        yield request
        yield from itertools.islice(made, _GENERATED_EACH)


def spread_requests() -> Iterator[HostileRequest]:
    """Yield the requests of the spread phase at their times; a late one comes at once."""
    count = _GENERATED + _GENERATED // _GENERATED_EACH
    began = time.monotonic()
    for at, request in enumerate(itertools.islice(hostile_requests(), count)):
        time.sleep(max(0.0, began + _SPREAD_S * at / count - time.monotonic()))
        yield request


def load(port: int, turns: Iterator[HostileRequest], outcomes: Outcomes) -> None:
    """Send the requests, four at a time."""
    shared = threading.Lock()

    def work() -> None:
        os.nice(_NICENESS)  # of this thread only, on Linux
        while True:
            with shared:
                request = next(turns, None)
            if request is None:
                return
            send(port, request, outcomes)

    with ThreadPoolExecutor(_ATTACKERS) as pool:
        for done in [pool.submit(work) for _ in range(_ATTACKERS)]:
            done.result()


def prove(model: Path) -> int:
    """Return the bytes of the engine's memory proof."""
    shape = model_files.model_geometry(
        model_files.inspect_model(model), casts_to_float32=sys.platform == "linux"
    )
    proof = memory_proof.prove(shape, context_length=_CONTEXT, concurrency=_CONCURRENCY)
    return proof.total_bytes


def is_idle(engine: Server) -> bool:
    health = json.loads(engine.call("GET", "/health")[1] or b"{}")
    return (health.get("inFlight"), health.get("queued"), health.get("busy")) == (0, 0, False)


def p99(times: list[float]) -> float:
    """Return the 99th percentile of the answered chats, in milliseconds."""
    answered = [one for one in times if one > 0]
    return round(statistics.quantiles(answered, n=100)[98] * 1e3, 1) if len(answered) > 1 else 0.0


def measure(model: Path) -> None:
    """Start an engine, measure, and print the last line."""
    proof_bytes, outcomes = prove(model), Outcomes()
    limits = {"context_length": _CONTEXT, "concurrency": _CONCURRENCY}
    with serving(start_ours(model, {"memory_limit_bytes": proof_bytes, **limits})) as (engine,):
        port, process = engine.port, engine.started[0]
        watch = MemoryWatch(process.pid)
        phases: dict[str, Callable[[], object]] = {
            "quiet": lambda: time.sleep(_QUIET_S),
            "spread": lambda: load(port, spread_requests(), outcomes),
        }
        times: dict[str, list[float]] = {name: [] for name in phases}
        threading.Thread(target=watch.run, daemon=True).start()
        for name, act in phases.items():
            with neighbouring(port, times[name]):
                act()
            print(f"{name}: {len(times[name])} chats, p99 {p99(times[name])} ms", flush=True)
        settled_s = engine.until(lambda: is_idle(engine))
        watch.stop()
        process.send_signal(signal.SIGTERM)
        code = process.wait(_SETTLE_S)
    for fault in outcomes.faults:
        print(f"fault: {fault}", flush=True)
    report(outcomes, times, memory=(watch.peak_bytes, proof_bytes), ends=(code, settled_s))


def report(
    outcomes: Outcomes,
    times: Mapping[str, list[float]],
    *,
    memory: tuple[int, int],
    ends: tuple[int, float],
) -> None:
    """Print the last line."""
    peak, proof = memory
    worst = {name: p99(found) for name, found in times.items()}
    holds = {
        "no_500": not outcomes.faults,
        "neighbour_p99_below_twice_quiet": worst["spread"] < 2 * worst["quiet"],
        "neighbour_always_answered": min(times["spread"], default=0) > 0,
        "memory_within_proof": peak <= proof,
        "ends_well": ends[0] == 0,
    }
    finish(
        "fuzz-engine",
        {f"{name}_ttft_p99_ms": value for name, value in worst.items()},
        {
            **{f"{name}_ttft_p50_ms": _median(found) for name, found in times.items()},
            "requests": outcomes.sent,
            "answers": dict(sorted(outcomes.answers.items())),
            "peak_mib": peak >> 20,
            "proof_mib": proof >> 20,
            "idle_again_s": round(ends[1], 2),
            "load_average": round(os.getloadavg()[0], 1),
            "holds": holds,
        },
    )


def _median(times: list[float]) -> float:
    return round(statistics.median([one for one in times if one > 0] or [0]) * 1e3, 1)


def main() -> None:
    """Measure, or be the neighbour."""
    words = arguments()
    if words[:1] == [_NEIGHBOUR]:
        neighbour(int(words[1]))
        return
    with tempfile.TemporaryDirectory() as name:
        measure(tiny_model(Path(name)))


if __name__ == "__main__":
    main()
