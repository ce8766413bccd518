"""Parts of all benches of the gateway: the programs in `native/`, child processes, their cores and their cost."""

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_NATIVE = Path(__file__).parent / "native"
_READY_S = 60.0


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Programs:
    """The compiled stand-in engine and load generator."""

    engine: Path
    load: Path


def compiled(folder: Path, *, with_tls: bool = False) -> Programs:
    """Compile both into the folder; a generator in Python is slower than what it measures.

    `with_tls` needs the headers of OpenSSL.
    """
    libraries = ("-DTLS", "-lssl", "-lcrypto") if with_tls else ()
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit("cc is not on PATH; apt install gcc, or xcode-select --install on a Mac")
    for name in ("engine", "load"):
        source, made = _NATIVE / f"{name}.c", folder / name
        command = [compiler, "-O2", "-o", str(made), str(source), *libraries]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            hint = "; TLS needs OpenSSL's headers: apt install libssl-dev" if with_tls else ""
            raise SystemExit(f"{source.name} cannot be compiled{hint}\n{done.stderr}")
    return Programs(folder / "engine", folder / "load")


@asynccontextmanager
async def child(
    *command: str, log: Path, env: Mapping[str, str] | None = None
) -> AsyncIterator[int]:
    """Run a program; yield its pid; end all of its processes."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env)  # noqa: ASYNC220 - once
    try:
        yield process.pid
    finally:
        ended = tree(process.pid)
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for one in ended:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def tree(pid: int) -> list[psutil.Process]:
    """Return the process and all that it started."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def own_core(*, is_gateway: bool) -> Iterator[None]:
    """Let what is started meanwhile run on the gateways' core, or on the others; Linux, with two cores or more.

    Every gateway then has one core, and load and engines do not take it away.
    """
    if sys.platform == "linux":
        cores = os.sched_getaffinity(0)
        last = {max(cores)}
        os.sched_setaffinity(0, last if is_gateway else (cores - last or cores))
        try:
            yield
        finally:
            os.sched_setaffinity(0, cores)
    else:
        yield


def cpu_s(pid: int | None) -> float:
    """Return the seconds of processor, user and system, that the process and its children took so far."""
    total = 0.0
    for process in tree(pid) if pid is not None else ():
        with suppress(psutil.NoSuchProcess, OSError):
            total += _own_cpu_s(process)
    return total


def _own_cpu_s(process: psutil.Process) -> float:
    if sys.platform == "linux":
        # The clock of the process, to the nanosecond and with threads that have ended: /proc counts in ticks of 10 ms.
        # Linux derives its number from the pid (MAKE_PROCESS_CPUCLOCK of its headers, with CPUCLOCK_SCHED).
        seconds = time.clock_gettime((~process.pid << 3) | 2)
    else:
        seconds = float(sum(process.cpu_times()[:2]))
    return seconds


def rss_mb(pid: int | None) -> float:
    """Return the memory that the process and its children hold, in megabytes."""
    total = 0
    for process in tree(pid) if pid is not None else ():
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return round(total / 1e6, 1)


def ask(
    port: int, path: str, timeout_s: float = 2.0, context: ssl.SSLContext | None = None
) -> bytes:
    """Return the body of a GET, over TLS with a context. Raises OSError."""
    url = f"http{'' if context is None else 's'}://127.0.0.1:{port}{path}"
    with urllib.request.urlopen(url, timeout=timeout_s, context=context) as response:
        return bytes(response.read())


async def answers(port: int, path: str, log: Path, context: ssl.SSLContext | None = None) -> None:
    """Wait until a GET is answered with success. Raises TimeoutError."""
    deadline_s = time.monotonic() + _READY_S
    while True:
        try:
            await asyncio.to_thread(ask, port, path, context=context)
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"port {port}: {error}\n{log.read_text()[-2000:]}") from error
            await asyncio.sleep(0.05)
        else:
            return


@dataclass
class Engine:
    """A stand-in engine on a port of its own, which may be killed, stopped and made to misbehave."""

    programs: Programs
    replica: str
    port: int
    options: tuple[str, ...] = ()
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [str(self.programs.engine), str(self.port), self.replica, *self.options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s:
            with suppress(OSError):
                ask(self.port, "/health")
                return
            time.sleep(0.005)
        raise SystemExit(f"the stand-in engine does not answer on port {self.port}")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def revive(self) -> None:
        """Make it run and behave, after any fault."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self.set("fault/none")
        else:
            self.start()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it ended by itself in time."""
        assert self._process is not None
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def set(self, what: str) -> None:
        """Set `fault/MODE` or `pace/US`."""
        ask(self.port, f"/{what}")

    def stats(self) -> dict[str, float]:
        """Return its counts; empty if it does not answer."""
        try:
            return dict(json.loads(ask(self.port, "/stats", 0.5)))
        except OSError:
            return {}
