"""From the start of an engine's process to its first token, beside `mlx_lm.server` on the same model: 5 rounds.

`python -m bench.engine_start [FOLDER]` takes a model's folder; without one SmolLM2 is made. Both sides take turns,
with a warm page cache and compiled Python files; what is compared is the median. `health_s`: the first answer of
any kind to GET /health. `ready_s`: ours 200 at /ready; theirs 200 at /health, which it gives while it still loads. So the
honest figure is `token_s`: a request for one token, repeated until it is answered with 200, has its answer.
"""

import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any, TypeAlias

import psutil

from bench.result import SMOKE, arguments, finish, of_peer, recorded, sized
from schemas.wire.engine_config import EngineConfig

Fields: TypeAlias = Mapping[str, Any]
ROUNDS = sized(5, smoke=1)
_LOOK_S = 0.025
_GIVE_UP_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Seconds since the process began, and what it holds when it has made a token."""

    health_s: float
    ready_s: float
    token_s: float
    cpu_s: float
    """Of all its threads until the first token."""
    idle_mb: float


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def start_engine(model: Path, port: int, *, fields: Fields, **options: Any) -> Popen[bytes]:
    """Start an engine that serves `bench`, with these fields of its configuration and options of Popen."""
    given = {"replica": "bench-0", "served_names": ("bench",), "context_length": 2048, **fields}
    config = EngineConfig(model_dir=model, url=f"http://127.0.0.1:{port}", **given)
    process = Popen([sys.executable, "-m", "engine"], stdin=subprocess.PIPE, **options)
    assert process.stdin is not None
    process.stdin.write(config.to_json())
    process.stdin.close()
    return process


def theirs(model: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)]


def asked(port: int, method: str, path: str, body: str | None = None) -> int:
    """Return the status; 0 if nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_GIVE_UP_S)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
    except OSError:
        return 0
    finally:
        connection.close()
    return response.status


def until(holds: Callable[[], bool], began: float) -> float:
    """Return the seconds since `began` when it first held."""
    while not holds():
        if time.perf_counter() - began > _GIVE_UP_S:
            raise TimeoutError("it never started")
        time.sleep(_LOOK_S)
    return time.perf_counter() - began


def one(begin: Callable[..., Popen[Any]], port: int, *, ready: str, name: str) -> Start:
    """Start a server, ask it for a token, and end it."""
    body = json.dumps({"model": name, "prompt": "One", "max_tokens": 1, "temperature": 0})
    began = time.perf_counter()
    # Containers like to set it; each start would then compile all that is not a package's.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    process = begin(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        health_s = until(lambda: asked(port, "GET", "/health") > 0, began)
        ready_s = until(lambda: asked(port, "GET", ready) == 200, began)
        token_s = until(lambda: asked(port, "POST", "/v1/completions", body) == 200, began)
        seen = psutil.Process(process.pid)
        times = seen.cpu_times()
        return Start(
            health_s=health_s,
            ready_s=ready_s,
            token_s=token_s,
            cpu_s=times.user + times.system,
            idle_mb=seen.memory_info().rss / 1e6,
        )
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def medians(starts: list[Start]) -> dict[str, float]:
    columns = zip(*(asdict(start).values() for start in starts), strict=True)
    return {
        name: round(statistics.median(column), 3)
        for name, column in zip(asdict(starts[0]), columns, strict=True)
    }


def tiny_model(folder: Path, *flags: str) -> Path:
    """Make a model with random weights."""
    made = folder / "tiny"
    make = [sys.executable, "-m", "tests.support.tiny_model", str(made), "--endless", *flags]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    return made


def real_model(folder: Path) -> Path:
    """Make SmolLM2, which is downloaded; in a smoke test a model with random weights."""
    if SMOKE:
        return tiny_model(folder)
    made = folder / "SmolLM2-135M-Instruct"
    subprocess.run([sys.executable, "-m", "examples.models.smollm2", str(made)], check=True)
    return made


def measure(model: Path) -> dict[str, dict[str, float]]:
    found: dict[str, list[Start]] = {"ours": [], "theirs": []}
    for number in range(ROUNDS + 1):
        port = free_port()
        mine = one(
            partial(start_engine, model, port, fields={"concurrency": 4}),
            port,
            ready="/ready",
            name="bench",
        )
        port = free_port()
        with of_peer():
            other = one(partial(Popen, theirs(model, port)), port, ready="/health", name=str(model))
        if number:  # the first reads what the others find in the page cache
            found["ours"].append(mine)
            found["theirs"].append(other)
    return {side: medians(starts) for side, starts in found.items()}


def main() -> None:
    """Measure and print."""
    failed: dict[str, str] = {}
    found: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as root, recorded(failed, "mlx_lm.server"):
        given = next(iter(arguments()), None)
        found = measure(Path(given) if given else real_model(Path(root)))
    if found:
        mine, other = found["ours"], found["theirs"]
        ratios = {f"{name}_ratio": round(mine[name] / other[name], 2) for name in mine}
        for name, ratio in ratios.items():
            plain = name.removesuffix("_ratio")
            print(f"{name:16} {ratio:6} {mine[plain]:10} {other[plain]:10}")
    finish("engine_start", ratios, {"rounds": ROUNDS, **found}, failed=failed)


if __name__ == "__main__":
    main()
