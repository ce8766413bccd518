"""The commands without their imports: each process is a fork of one that has made them all.

A command spends more time on imports than on its work, and the tests run hundreds. A fork is the
real command all the same: `python -m fleetctl` (or another module) in a process of its own, with its
own arguments, environment, folder, input, output and end.

`python -m tests.support.forker FD` is the process that forks; it ends with who started it.
"""

import asyncio
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from machinery import processes
from machinery.processes import ChildProcess, ProcessRecord, spawn

_PACKAGES = ("fleetctl", "gateway", "nodeagent", "reconciler")
"""The modules that the commands import; engines import many others, and are no forks."""
_LARGEST = 1 << 20


class Forker:
    """The process that forks, started when it is first asked. Forks of this process share one that runs already."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    def start(self) -> socket.socket:
        """Start it, unless it runs; return the connection to it."""
        if self._line is None:
            # Whole messages, and an end that is seen when either side is gone.
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                number = theirs.fileno()
                command = [sys.executable, "-m", "tests.support.forker", str(number)]
                self._process = subprocess.Popen(command, pass_fds=(number,))
        return self._line

    async def run(
        self, words: Sequence[str], stdin: bytes = b"", *, module: str = "fleetctl"
    ) -> tuple[int, bytes, bytes]:
        """Run `python -m module` with these words; return its exit code and what it wrote."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            files[0].write(stdin)
            files[0].seek(0)
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            ours.setblocking(False)
            with theirs:
                passed = [*(file.fileno() for file in files), theirs.fileno()]
                self._order(module, words, passed)
            code = await _told(ours)
            for file in files[1:]:
                file.seek(0)
            return code, files[1].read(), files[2].read()

    def spawn(self, module: str, words: Sequence[str], *, log: Path) -> ChildProcess:
        """Start `python -m module`, in a session of its own, its output appended to a file: it stays.

        As `machinery.processes.spawn` does, but for its exit code, which nobody can be told.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with ours, log.open("ab") as output, Path(os.devnull).open("rb") as nothing:
            with theirs:
                passed = [nothing.fileno(), output.fileno(), output.fileno(), theirs.fileno()]
                self._order(module, words, passed, stays=True)
            pid = int(ours.recv(64) or -1)
        assert pid > 0, "the process that forks has ended"
        try:
            mark = processes.process_start(pid)
        except psutil.Error:  # it has ended already
            mark = ""
        return ChildProcess(ProcessRecord(pid=pid, start=mark, command=(module, *words)), None)

    def _order(
        self, module: str, words: Sequence[str], passed: list[int], *, stays: bool = False
    ) -> None:
        order = {
            "module": module,
            "words": list(words),
            "folder": str(Path.cwd()),
            "environ": dict(os.environ),
            "stays": stays,
        }
        socket.send_fds(self.start(), [json.dumps(order).encode()], passed)

    def end(self) -> None:
        """End it, if it was started; in a fork, leave it to the others."""
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            self._process.kill()  # nothing if it is the child of another process
            self._process.wait(10)
            self._process = None


# One for all tests of a process; the session's end is its own.
SHARED = Forker()


def is_sound() -> bool:
    """Return whether there may be forks: on macOS those of a process that has used its frameworks crash."""
    return sys.platform == "linux"


def start(module: str, words: Sequence[str], *, log: Path) -> ChildProcess:
    """Start `python -m module` as a process that stays: a fork, or with all its imports where that is not sound."""
    if is_sound():
        return SHARED.spawn(module, words, log=log)
    return spawn([sys.executable, "-m", module, *words], log=log)


async def _told(line: socket.socket) -> int:
    """Return the exit code that the fork's parent tells; end the fork if nobody waits for it."""
    loop = asyncio.get_running_loop()
    pid = int(await loop.sock_recv(line, 64) or -1)
    assert pid > 0, "the process that forks has ended"
    told = b""
    try:
        told = await loop.sock_recv(line, 64)
    finally:
        if not told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return int(told)


def _serve(line: socket.socket) -> tuple[str, list[str]]:
    """Fork for each order; return, in each fork, its module and its words. Exits at the end."""
    while True:
        order, passed, _, _ = socket.recv_fds(line, _LARGEST, 4)
        if not order:
            os._exit(0)
        if os.fork() == 0:
            line.close()
            return _follow(json.loads(order), passed)
        for number in passed:
            os.close(number)


def _follow(order: dict[str, object], passed: Sequence[int]) -> tuple[str, list[str]]:
    """Fork once more: the parent tells what becomes of the child, the child is the command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asks = socket.socket(fileno=passed[3])
    pid = os.fork()
    if pid:
        asks.send(str(pid).encode())
        if order["stays"]:
            # Held open, files and sockets of who asked would seem to be in use.
            for number in passed:
                os.close(number)
            asks.detach()
        _, status = os.waitpid(pid, 0)
        if not order["stays"]:
            asks.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    asks.close()
    if order["stays"]:
        os.setsid()
    for wanted, number in enumerate(passed[:3]):
        os.dup2(number, wanted)
        os.close(number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module, words = order["module"], order["words"]
    folder, environ = order["folder"], order["environ"]
    assert isinstance(module, str)
    assert isinstance(words, list)
    assert isinstance(folder, str)
    assert isinstance(environ, dict)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    return module, words


def _modules() -> Iterator[str]:
    """Yield the names of what is imported before there are forks."""
    for name in _PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            is_engine = module.name.startswith("engine.")
            if not is_engine and not module.name.endswith("__main__"):
                yield module.name


def main() -> None:
    """Import everything, serve, and in each fork be `python -m fleetctl`."""
    line = socket.socket(fileno=int(sys.argv[1]))
    # Whoever tells of a fork's end is waited for by nobody; Ctrl-C is for the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _modules():
        importlib.import_module(name)
    gc.freeze()
    module, sys.argv[1:] = _serve(line)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
