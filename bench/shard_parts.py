"""Parts of `bench.shard`: groups of ranks, ours and `mlx.launch`'s, and a client that notes when tokens come."""

import contextlib
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.engine_start import free_port, start_engine, theirs
from bench.result import of_peer
from schemas.wire.engine_config import GroupConfig

READY_S = 120.0
_LOOK_S = 0.05
_ANSWER_S = 120.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"\b\w*(Error|Exception)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Input of both sides."""

    model: Path
    folder: Path
    """For files of words and hosts."""
    threads: int
    """Of BLAS, all ranks of a side together."""
    library: Path | None
    """A fast BLAS, which ours finds itself."""


@dataclass(slots=True, kw_only=True)
class Side:
    """One group that serves, or is about to."""

    name: str
    model: str
    """By this name it is asked."""
    port: int
    logs: list[Path] = field(default_factory=list)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def blamed(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the peer's failures are its own, and ours are errors of the bench."""
        return contextlib.nullcontext() if self.name == "ours" else of_peer()

    def last_words(self) -> str:
        """Return the last error in each process's log, or else its last line: a launcher goes on after an error."""
        found = []
        for log in self.logs:
            lines = _COLOUR.sub("", log.read_text(errors="replace")).strip().splitlines()
            errors = [line for line in lines if _ERROR.search(line)]
            found += (errors or lines)[-1:]
        return " | ".join(line.strip() for line in found)[-500:] or "it wrote nothing"

    def processes(self) -> list[psutil.Process]:
        """Return all of its processes, those of a launcher included."""
        found: list[psutil.Process] = []
        for process in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                one = psutil.Process(process.pid)
                found += [one, *one.children(recursive=True)]
        return found

    def signal(self, number: int) -> None:
        """Send all of them a signal."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def cpu_s(self) -> float:
        """Return what they have used."""
        times = [process.cpu_times() for process in self.processes()]
        return sum(pcputimes.user + pcputimes.system for pcputimes in times)

    def end(self) -> None:
        """End all of them, now."""
        gone = self.processes()
        for process in gone:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for started in self.started:
            started.wait()
        psutil.wait_procs(gone, timeout=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Figures of several requests at once."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    ttft_s: float
    """The median's."""


def _environment(settings: Settings, size: int) -> dict[str, str]:
    hub = settings.folder / "hub"
    hub.mkdir(exist_ok=True)  # mlx_lm.server wants one, if only to find nothing in it
    more = {
        "OPENBLAS_NUM_THREADS": str(max(1, settings.threads // size)),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(hub),
    }
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return kept | more


def _start(
    command: Sequence[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("ab") as words:
        # A launcher looks at its standard input all the time: a pipe on which nothing comes.
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=words, stderr=words
        )


def start_ours(settings: Settings, size: int, *, epoch: int = 1) -> Side:
    """Start a group of our engine as agents do, or one engine."""
    ports = [free_port() for _ in range(2 * size + 1)]
    side = Side(name="ours", model="bench", port=ports[0])
    hosts = settings.folder / f"hosts-{ports[0]}"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[size : 2 * size]]))
    for rank in range(size):
        fields: dict[str, object] = {"concurrency": 4}
        environment = _environment(settings, size)
        if size > 1:
            fields["group"] = GroupConfig(
                rank=rank,
                world_size=size,
                host="127.0.0.1",
                port=ports[-1],
                secret=f"bench {epoch}",
                epoch=epoch,
            )
            environment |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
        log = settings.folder / f"ours-{size}-{rank}.log"
        side.logs.append(log)
        with log.open("ab") as words:
            options = {"env": environment, "stdout": words, "stderr": words}
            process = start_engine(settings.model, ports[rank], fields=fields, **options)
        side.started.append(process)
    return side


def start_theirs(settings: Settings, size: int) -> Side:
    """Start `mlx_lm.server`, through `mlx.launch` if there are several ranks."""
    port = free_port()
    command = theirs(settings.model, port)
    if size > 1:
        launch = str(Path(sys.executable).parent / "mlx.launch")
        ring = ["-n", str(size), "--backend", "ring", "--starting-port", str(free_port())]
        command = [launch, *ring, "--", *command]
    environment = _environment(settings, size)
    if settings.library is not None:
        environment["LD_PRELOAD"] = str(settings.library)
    log = settings.folder / f"mlx_lm-{size}.log"
    side = Side(name="mlx_lm", model=str(settings.model), port=port, logs=[log])
    side.started.append(_start(command, environment, log))
    return side


def answers(side: Side, timeout_s: float = _ANSWER_S) -> bool:
    """Return whether it makes a token."""
    connection = http.client.HTTPConnection("127.0.0.1", side.port, timeout=timeout_s)
    request = {"model": side.model, "prompt": "One", "max_tokens": 1, "temperature": 0}
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(request), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return response.status == 200


def until_serving(side: Side, within_s: float = READY_S) -> float:
    """Return the seconds until it makes a token.

    Raises:
        TimeoutError: it does not.
        RuntimeError: all of its processes ended.

    """
    began = time.perf_counter()
    while not answers(side, max(1.0, within_s - (time.perf_counter() - began))):
        if all(process.poll() is not None for process in side.started):
            codes = ", ".join(str(process.returncode) for process in side.started)
            raise RuntimeError(f"it ended with exit code {codes}: {side.last_words()}")
        if time.perf_counter() - began > within_s:
            raise TimeoutError(f"it did not serve within {within_s:g} s: {side.last_words()}")
        time.sleep(_LOOK_S)
    return time.perf_counter() - began


@contextlib.contextmanager
def awake(side: Side) -> Iterator[None]:
    """Let a side run for a while; outside it stands still, for idle ranks of mlx_lm.server take a core each."""
    side.signal(signal.SIGCONT)
    try:
        yield
    finally:
        side.signal(signal.SIGSTOP)


def turn(side: Side, prompts: Sequence[str], tokens: int) -> Turn:
    """Send all of these at once."""
    cpu, began = side.cpu_s(), time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda text: _ask(side, text, tokens), prompts))
    wall, cpu = time.perf_counter() - began, side.cpu_s() - cpu
    made = sum(count for _, count in found)
    return Turn(
        tokens_per_s=made / wall,
        tokens_per_cpu_s=made / max(cpu, 0.01),
        ttft_s=statistics.median(first for first, _ in found),
    )


def _ask(side: Side, text: str, tokens: int) -> tuple[float, int]:
    """Return the seconds to the first token, and how many came."""
    request = {
        "model": side.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", side.port, timeout=_ANSWER_S)
    began, first, made = time.perf_counter(), 0.0, 0
    with contextlib.closing(connection):
        body, kind = json.dumps(request), {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, kind)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{side.name}: {response.status} {response.read()[:200]!r}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                made = event["usage"]["completion_tokens"]
            deltas = [choice.get("delta", {}) for choice in event.get("choices", ())]
            if not first and any(
                delta.get("content") or delta.get("reasoning") for delta in deltas
            ):
                first = time.perf_counter() - began
    return first, made
