"""Real engine processes on a tiny model, and a plain HTTP client for what no client library sends."""

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

import openai
import pytest

from tests.support.models import MODEL
from tests.support.ports import free_port

START_S = 60.0
Json = dict[str, Any]
Headers = Mapping[str, str]
NO_HEADERS: Headers = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back."""

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Json:
        parsed: Json = json.loads(self.raw)
        return parsed

    @property
    def error(self) -> Json:
        found: Json = self.json["error"]
        return found


def eventually(holds: Callable[[], bool], *, within_s: float = 20.0, what: str = "") -> None:
    """Look again and again until something holds."""
    deadline = time.perf_counter() + within_s
    while not holds():
        assert time.perf_counter() < deadline, f"not within {within_s} s: {what or holds}"
        time.sleep(0.01)


class Process(Protocol):
    """What is asked of one: subprocess.Popen, or a fork (ranks/forks.py)."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One process, its port, and where its stderr goes."""

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
        """Send a chat request and leave its answer unread."""
        connection = self.connect()
        messages = [{"role": "user", "content": "hello"}]
        body = json.dumps({"model": "tiny", "messages": messages, "temperature": 0} | fields)
        connection.request("POST", "/v1/chat/completions", body.encode(), dict(headers))
        return connection

    def health(self) -> Reply:
        return self.request("GET", "/health")

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
            return False  # not yet; or no more, which the next look tells

    def busy(self) -> tuple[int, int]:
        seen = self.health().json
        return seen["inFlight"], seen["queued"]

    def wait(self, timeout_s: float = 30) -> int:
        return self.process.wait(timeout_s)

    def last_words(self) -> str:
        return self.stderr.read_text().splitlines()[-1]


Start = Callable[..., Engine]


def told(model: Path, port: int, cache: Path, flags: Mapping[str, object]) -> list[str]:
    """Return an engine's command line; `flags` are its more special ones."""
    given = {"context_length": 4096, "concurrency": 8, **flags}
    return [
        *("--model-dir", str(model), "--replica", "tiny-0", "--replica-uid", "uid-0"),
        *("--node", "mac-1", "--served-name", "tiny", "--served-name", "fast"),
        *("--port", str(port), "--blas-cache", str(cache)),
        *(f"--{name.replace('_', '-')}={value}" for name, value in given.items()),
    ]


@contextlib.contextmanager
def launching(folder: Path, cache: Path) -> Iterator[Start]:
    """Give a function that starts engines; end those which still run."""
    started: list[Engine] = []

    def start(
        model: Path,
        *,
        port: int = 0,
        shadow: str = "",
        variables: Headers = NO_HEADERS,
        **flags: object,
    ) -> Engine:
        """Start an engine; `shadow` is a folder of modules that go before the installed ones."""
        port = port or free_port()
        command = [sys.executable, "-m", "engine", *told(model, port, cache, flags)]
        stderr = folder / f"stderr-{len(started)}"
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": shadow} if shadow else {}
        environment |= variables
        with stderr.open("wb") as file:
            process = subprocess.Popen(command, stderr=file, env=environment)
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


@pytest.fixture(scope="session")
def blas_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blas")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose greedy text never ends by itself."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    command = [sys.executable, "-m", "tests.support.tiny_model", str(folder), "--endless"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture
def start(tmp_path: Path, blas_cache: Path) -> Iterator[Start]:
    with launching(tmp_path, blas_cache) as function:
        yield function


@pytest.fixture(scope="session")
def shared(
    tiny: Path, blas_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with launching(tmp_path_factory.mktemp("shared"), blas_cache) as function:
        engine = function(tiny, concurrency=16)
        eventually(engine.is_ready, within_s=START_S)
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The engine that all tests of a pytest process share: endless, 16 slots, a context of 4096.

    Each test must leave it healthy and idle.
    """
    yield shared
    eventually(lambda: shared.busy() == (0, 0), what="idle after the test")
    assert shared.is_ready()


@pytest.fixture
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=engine.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def real(
    smollm2: Path, blas_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine with SmolLM2, for what random weights cannot show; some 10 tokens a second."""
    with launching(tmp_path_factory.mktemp("real"), blas_cache) as function:
        engine = function(smollm2 / MODEL, concurrency=4)
        eventually(engine.is_ready, within_s=START_S)
        yield engine
