"""Engines that start without imports: each process is a fork of one that has imported everything an engine needs.

An engine's start is two or three seconds of imports, and the tests start dozens. Sound on Linux alone, where MLX
does nothing on import that a fork would lose; elsewhere engines are started as agents do it.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from engine.linux import blas
from tests.support import forker
from tests.support.engine_process import (
    NO_HEADERS,
    Engine,
    Headers,
    Start,
    engine_document,
    launching,
)
from tests.support.ports import free_port

_END_S = 30.0


class Forked:
    """A forked engine, with the interface of subprocess.Popen that tests use."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, f"it has not ended within {timeout} s"
        return code

    def send_signal(self, sig: int) -> None:
        os.kill(self.pid, sig)


@contextlib.contextmanager
def forking(folder: Path, cache: Path) -> Iterator[Start]:
    """Yield a function that starts engines; at the end, kill those that still run."""
    if not forker.is_sound():
        with launching(folder, cache) as function:
            yield function
        return
    context = _context(cache)
    started: list[Engine] = []

    def start(
        model: Path, *, port: int = 0, variables: Headers = NO_HEADERS, **fields: object
    ) -> Engine:
        port = port or free_port()
        stderr = folder / f"stderr-{len(started)}"
        document = engine_document(model, port, cache, fields)
        process = context.Process(target=_run, args=(document, dict(variables), stderr))
        process.start()
        started.append(Engine(process=Forked(process), port=port, stderr=stderr))
        return started[-1]

    try:
        yield start
    finally:
        for engine in started:
            if engine.process.poll() is None:
                engine.process.send_signal(signal.SIGKILL)
        for engine in started:
            engine.process.wait(_END_S)


def _context(cache: Path) -> ForkServerContext:
    """Return the fork server's context. The first fork starts the server, with the environment of that moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.engine_preloaded"])
    library = blas.locate(cache)
    before = dict(os.environ)
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    os.environ |= {} if library is None else {"LD_PRELOAD": str(library)}
    try:
        first = context.Process(target=gc.freeze)
        first.start()
        first.join()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _run(document: bytes, variables: Mapping[str, str], stderr: Path) -> None:
    """Run an engine in this process."""
    from engine import config, process  # noqa: PLC0415 - as a fork has it already

    os.environ.update(variables)
    with stderr.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(process.run(config.parse(document)))
