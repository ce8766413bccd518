"""Real engine processes, and a plain HTTP client for requests that no client library sends."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from tests.support.ports import free_port

START_S = 60.0
Json = dict[str, Any]
Headers = Mapping[str, str]
NO_HEADERS: Headers = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One HTTP response."""

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Json:
        parsed: Json = json.loads(self.raw)
        return parsed

    @property
    def error(self) -> Json:
        error: Json = self.json["error"]
        return error


def eventually(holds: Callable[[], bool], *, within_s: float = 20.0, what: str = "") -> None:
    """Poll until a condition holds; fail after `within_s` seconds."""
    deadline = time.perf_counter() + within_s
    while not holds():
        assert time.perf_counter() < deadline, f"not within {within_s} s: {what or holds}"
        time.sleep(0.01)


class Process(Protocol):
    """The used part of subprocess.Popen, and of forks (tests/support/engine_forks.py)."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine process, its port and the file of its stderr."""

    process: Process
    port: int
    stderr: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Headers = NO_HEADERS
    ) -> Reply:
        with contextlib.closing(self.connect()) as connection:
            given = {"content-type": "application/json", **headers}
            connection.request(method, path, body, given)
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Reply(status=response.status, headers=headers, raw=response.read())

    def post(self, path: str, *, headers: Headers = NO_HEADERS, **fields: Any) -> Reply:
        body = json.dumps({"model": "tiny"} | fields).encode()
        return self.request("POST", path, body, headers)

    def chat(self, text: str = "hello", *, headers: Headers = NO_HEADERS, **fields: Any) -> Reply:
        messages = [{"role": "user", "content": text}]
        fields = {"messages": messages, "max_tokens": 8, "temperature": 0} | fields
        return self.post("/v1/chat/completions", headers=headers, **fields)

    def begin(self, *, headers: Headers = NO_HEADERS, **fields: Any) -> http.client.HTTPConnection:
        """Send a chat request without reading the response."""
        connection = self.connect()
        messages = [{"role": "user", "content": "hello"}]
        body = json.dumps({"model": "tiny", "messages": messages, "temperature": 0} | fields)
        connection.request("POST", "/v1/chat/completions", body.encode(), dict(headers))
        return connection

    def health(self) -> Reply:
        return self.request("GET", "/health")

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics by name and labels, without the prefix."""
        reply = self.request("GET", "/metrics")
        assert reply.status == 200
        assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = (line for line in reply.raw.decode().splitlines() if not line.startswith("#"))
        pairs = (line.rsplit(" ", 1) for line in lines)
        return {name.removeprefix("fleet_engine_"): float(value) for name, value in pairs}

    def answers(self) -> bool:
        try:
            self.health()
        except OSError:
            return False
        return True

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.stderr.read_text()
        try:
            return self.health().status == 200
        except OSError:
            return False  # not yet listening, or ended, which the next call finds

    def busy(self) -> tuple[int, int]:
        health = self.health().json
        return health["inFlight"], health["queued"]

    def wait(self, timeout_s: float = 30) -> int:
        return self.process.wait(timeout_s)

    def last_words(self) -> str:
        return self.stderr.read_text().splitlines()[-1]


Start = Callable[..., Engine]


def engine_document(model: Path, port: int, cache: Path, fields: Mapping[str, object]) -> bytes:
    """Return the configuration of an engine; `fields` are added to those that all tests need."""
    scheme = "https" if "identity_dir" in fields else "http"
    given = {
        "model_dir": model,
        "replica": "tiny-0",
        "replica_uid": "uid-0",
        "node": "mac-1",
        "served_names": ("tiny", "fast"),
        "url": f"{scheme}://127.0.0.1:{port}",
        "blas_cache": cache,
        "context_length": 4096,
        "concurrency": 8,
    }
    tree = {to_camel(name): value for name, value in {**given, **fields}.items()}
    return json.dumps(tree, default=_as_json).encode()


def _as_json(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_none=True)
    return str(value)


@contextlib.contextmanager
def launching(folder: Path, cache: Path) -> Iterator[Start]:
    """Yield a function that starts engines; stop those that still run at the end."""
    started: list[Engine] = []

    def start(
        model: Path,
        *,
        port: int = 0,
        shadow: str = "",
        variables: Headers = NO_HEADERS,
        **fields: object,
    ) -> Engine:
        """Start an engine; `shadow` is a folder of modules that replace installed ones."""
        port = port or free_port()
        command = [sys.executable, "-m", "engine"]
        stderr = folder / f"stderr-{len(started)}"
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": shadow} if shadow else {}
        environment |= variables
        with stderr.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=file, env=environment)
        assert process.stdin is not None
        process.stdin.write(engine_document(model, port, cache, fields))
        process.stdin.close()
        started.append(Engine(process=process, port=port, stderr=stderr))
        return started[-1]

    try:
        yield start
    finally:
        for engine in started:
            if engine.process.poll() is None:
                engine.process.send_signal(signal.SIGTERM)
                engine.process.send_signal(signal.SIGTERM)
        for engine in started:
            engine.process.wait(START_S)
