"""Our engine and `mlx_lm.server` on the same model, alone or as a group of ranks, and a client that notes when tokens come."""

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
from typing import Any

import psutil

from bench.harness import SMOKE, cpu_s, of_peer, tree
from engine.linux import blas
from schemas.wire.engine_config import EngineConfig, GroupConfig
from tests.support.ports import free_port

Json = dict[str, Any]
READY_S, _ANSWER_S, _LOOK_S, _RESET_S = 120.0, 280.0, 0.025, 5.0
_WORDS = "time year people way day man thing woman life child world school state family group hand"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"\b\w*(Error|Exception)\b")


@dataclass(slots=True)
class Reply:
    """The times of the pieces of one answer, in seconds from the request."""

    times: list[float] = field(default_factory=list)
    tokens: int = 0
    text: str = ""
    whole_s: float = 0.0

    @property
    def decode_per_s(self) -> float:
        """Tokens a second from the first piece to the end."""
        return (self.tokens - 1) / (self.whole_s - self.times[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Figures of several requests at once."""

    wall_s: float
    cpu_s: float
    replies: list[Reply]

    @classmethod
    def joined(cls, bursts: Sequence["Burst"]) -> "Burst":
        """Return several bursts of one server, one behind the other, as one."""
        return cls(
            wall_s=sum(burst.wall_s for burst in bursts),
            cpu_s=sum(burst.cpu_s for burst in bursts),
            replies=[reply for burst in bursts for reply in burst.replies],
        )

    @property
    def tokens_per_s(self) -> float:
        return sum(reply.tokens for reply in self.replies) / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return sum(reply.tokens for reply in self.replies) / max(self.cpu_s, 0.01)

    @property
    def ttft_s(self) -> float:
        """The median time to the first token."""
        return statistics.median(reply.times[0] for reply in self.replies)

    def gaps(self, skip: int = 0) -> list[float]:
        """Return the sorted seconds between two pieces of one answer, those of the first pieces left out."""
        return sorted(
            after - before
            for reply in self.replies
            for before, after in zip(reply.times[skip:], reply.times[skip + 1 :], strict=False)
        )


@dataclass(slots=True, kw_only=True)
class Server:
    """One server, of one process or of a group of ranks, that serves or is about to."""

    name: str
    model: str
    """The name that requests give."""
    port: int
    logs: list[Path] = field(default_factory=list)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def blamed(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the peer's failures are its own, and ours are errors of the bench."""
        return contextlib.nullcontext() if self.name == "ours" else of_peer()

    def last_words(self) -> str:
        """Return the last error in each process's log, or else its last line: a launcher goes on after an error."""
        words = []
        for log in self.logs:
            lines = _COLOUR.sub("", log.read_text(errors="replace")).strip().splitlines()
            errors = [line for line in lines if _ERROR.search(line)]
            words += (errors or lines)[-1:]
        return " | ".join(line.strip() for line in words)[-500:] or "it wrote nothing"

    def processes(self) -> list[psutil.Process]:
        """Return all of its processes, those of a launcher included."""
        return [process for started in self.started for process in tree(started.pid)]

    def signal(self, number: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run for a while; outside it stands still, for idle ranks of mlx_lm.server take a core each."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def cpu_s(self) -> float:
        return sum(cpu_s(started.pid) for started in self.started)

    def rss_mb(self) -> float:
        return sum(process.memory_info().rss for process in self.processes()) / 1e6

    def end(self) -> None:
        """Kill all of its processes."""
        processes = self.processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for started in self.started:
            started.wait()
        psutil.wait_procs(processes, timeout=10)

    def call(self, method: str, path: str, body: Json | str | None = None) -> tuple[int, bytes]:
        """Return status and body of an answer; the status is 0 without one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        with contextlib.closing(connection):
            raw = json.dumps(body) if isinstance(body, dict) else body
            try:
                connection.request(method, path, raw, {"content-type": "application/json"})
                response = connection.getresponse()
                return response.status, response.read()
            except (OSError, http.client.HTTPException):
                return 0, b""

    def metric(self, name: str) -> float:
        """Return one number of ours at /metrics, 0 if it is not there."""
        for line in self.call("GET", "/metrics")[1].decode().splitlines():
            if line.startswith(f"fleet_engine_{name} "):
                return float(line.split()[1])
        return 0.0

    def makes_a_token(self) -> bool:
        turn = {"role": "user", "content": "One"}
        request = {"model": self.model, "messages": [turn], "max_tokens": 1, "temperature": 0}
        return self.call("POST", "/v1/chat/completions", request)[0] == 200

    def until(self, holds: Any = None, within_s: float = READY_S) -> float:
        """Wait until it makes a token, or until a condition holds; return the seconds.

        Raises:
            TimeoutError: it does not.
            RuntimeError: all of its processes ended.

        """
        began = time.perf_counter()
        while not (holds or self.makes_a_token)():
            if all(process.poll() is not None for process in self.started):
                codes = ", ".join(str(process.returncode) for process in self.started)
                raise RuntimeError(f"it ended with exit code {codes}: {self.last_words()}")
            if time.perf_counter() - began > within_s:
                raise TimeoutError(f"not within {within_s:g} s: {self.last_words()}")
            time.sleep(_LOOK_S)
        return time.perf_counter() - began

    def ask(self, text: str, tokens: int, **more: Any) -> Reply:
        """Stream a chat, greedily and without an end before `tokens`; note when each piece of text came."""
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        reply, began = Reply(), time.perf_counter()
        with self.blamed(), contextlib.ExitStack() as stack:
            kind = {"content-type": "application/json"}
            response = None
            while response is None:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
                stack.callback(connection.close)
                try:
                    connection.request("POST", "/v1/chat/completions", json.dumps(request), kind)
                    response = connection.getresponse()
                except (
                    ConnectionResetError
                ):  # 16 at once overflow the listen backlog of mlx_lm.server, which is 5
                    if time.perf_counter() - began > _RESET_S:
                        raise
                    time.sleep(_LOOK_S)
            if response.status != 200:
                raise RuntimeError(f"{self.name}: {response.status} {response.read()[:200]!r}")
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                reply.tokens = (event.get("usage") or {}).get("completion_tokens", reply.tokens)
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", {})
                    if piece := delta.get("content") or delta.get("reasoning"):
                        reply.text += piece
                        reply.times.append(time.perf_counter() - began)
        reply.whole_s = time.perf_counter() - began
        return reply

    def burst(self, texts: Sequence[str], tokens: int, *fields: Json) -> Burst:
        """Ask all of these at once; `fields` are more fields of each request."""
        cpu, began = self.cpu_s(), time.perf_counter()
        extra = fields or ({},) * len(texts)
        with ThreadPoolExecutor(len(texts)) as pool:
            replies = list(
                pool.map(lambda text, more: self.ask(text, tokens, **more), texts, extra)
            )
        return Burst(wall_s=time.perf_counter() - began, cpu_s=self.cpu_s() - cpu, replies=replies)


def _environment(folder: Path, size: int) -> dict[str, str]:
    hub = folder / "hub"
    hub.mkdir(exist_ok=True)  # mlx_lm.server wants one, if only to find nothing in it
    threads = str(max(1, (os.cpu_count() or 1) // size))
    # Containers like to set PYTHONDONTWRITEBYTECODE; each start would then compile all that is not a package's.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    more = {"OPENBLAS_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub)}
    return inherited | more


def start_ours(model: Path, fields: Json | None = None, *, size: int = 1, epoch: int = 1) -> Server:
    """Start our engine, or a group of ranks as agents do, with these fields of its configuration."""
    ports, folder = [free_port() for _ in range(2 * size + 1)], model.parent
    server = Server(name="ours", model="bench", port=ports[0])
    environment, group = _environment(folder, size), {}
    for rank in range(size):
        if size > 1:
            hosts = folder / f"hosts-{ports[0]}"
            hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[size : 2 * size]]))
            environment |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
            group["group"] = GroupConfig(
                rank=rank,
                world_size=size,
                host="127.0.0.1",
                port=ports[-1],
                secret=f"bench {epoch}",
                epoch=epoch,
            )
        values: Json = {"context_length": 4096, "concurrency": 32, **(fields or {}), **group}
        config = EngineConfig(
            model_dir=model,
            url=f"http://127.0.0.1:{ports[rank]}",
            replica="bench-0",
            served_names=("bench",),
            **values,
        )
        log = folder / f"ours-{ports[0]}-{rank}.log"
        server.logs.append(log)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "engine"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )
        assert process.stdin is not None
        process.stdin.write(config.to_json())
        process.stdin.close()
        server.started.append(process)
    return server


def start_theirs(model: Path, *, size: int = 1) -> Server:
    """Start `mlx_lm.server`, through `mlx.launch` if there are several ranks."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model)]
    command += ["--port", str(port)]
    if size > 1:
        launch = str(Path(sys.executable).parent / "mlx.launch")
        ring = ["-n", str(size), "--backend", "ring", "--starting-port", str(free_port())]
        command = [launch, *ring, "--", *command]
    return start_peer("mlx_lm", command, model, port=port, size=size)


def start_peer(
    name: str, command: Sequence[str], model: Path, *, port: int, size: int = 1
) -> Server:
    """Start another server with the BLAS that ours finds."""
    folder = model.parent
    environment = _environment(folder, size)
    if (library := fast_blas(model)) is not None:
        environment["LD_PRELOAD"] = str(library)
    log = folder / f"{name}-{port}.log"
    server = Server(name=name, model=str(model), port=port, logs=[log])
    with log.open("ab") as output:
        # A launcher looks at its standard input all the time: a pipe on which nothing comes.
        # Some write logs into the folder in which they run.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
    server.started.append(process)
    return server


def fast_blas(model: Path) -> Path | None:
    return blas.locate(model.parent / "blas") if sys.platform == "linux" else None


@contextlib.contextmanager
def serving(*servers: Server) -> Iterator[tuple[Server, ...]]:
    """Wait until the servers make tokens, and end them afterwards."""
    try:
        for server in servers:
            with server.blamed():
                server.until()
        yield servers
    finally:
        for server in servers:
            server.end()


def prompt(rng: Any, words: int) -> str:
    """Return so many words, about a token each."""
    return " ".join(rng.choice(_WORDS.split()) for _ in range(words))


def _made(module: str, folder: Path, *flags: str) -> Path:
    command = [sys.executable, "-m", f"tests.support.{module}", str(folder), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def tiny_model(folder: Path, *flags: str) -> Path:
    """Make a model with random weights."""
    return _made("tiny_model", folder / "tiny", "--endless", *flags)


def family_model(folder: Path, family: str) -> Path:
    """Make a tiny model of a family with random weights."""
    return _made("model_families", folder / family, family)


def mtp_model(folder: Path, *flags: str) -> Path:
    """Make a checkpoint with an MTP head, whose passes cost about what those of SmolLM2 do."""
    size = ("--layers", "13", "--hidden", "576", "--influence", "0.2")
    return _made("mtp_models", folder, *size, *flags)


def real_model(folder: Path) -> Path:
    """Make SmolLM2, which is downloaded; in a smoke test a model with random weights."""
    if SMOKE:
        return tiny_model(folder)
    made = folder / "SmolLM2-135M-Instruct"
    subprocess.run([sys.executable, "-m", "examples.models.smollm2", str(made)], check=True)
    return made
