"""Runs a Python module in a child process with limits of memory and time, for untrusted input.

The kernel ends the child on Linux; macOS ignores limits of memory, so the parent looks at the child's, too. The module
calls `serve`, and nothing else before it that reads the input.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from tempfile import TemporaryFile
from typing import BinaryIO, Final

from machinery.environment import environment_without_secrets
from machinery.footprint import footprint_bytes
from machinery.process_secrets import disable_core_dumps

_POLL_S: Final = 0.02
_EXIT_MEMORY: Final = 71
"""The exit code of a child whose interpreter ran out of memory."""
# Libraries in C and Rust end the process if they get no memory.
_OUT_OF_MEMORY: Final = (_EXIT_MEMORY, -signal.SIGABRT, -signal.SIGSEGV)
_OUT_OF_TIME: Final = (-signal.SIGXCPU, -signal.SIGALRM)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    """The limits of a child."""

    memory_bytes: int
    """Resident on macOS; the whole address space on Linux, with 100 MB for the interpreter."""
    cpu_s: int
    wall_s: float
    output_bytes: int = 64 << 20
    """Of its output, and of each file that it writes."""


class ChildEnd(StrEnum):
    """The end of a child."""

    DONE = "done"
    MEMORY = "memory"
    """It reached the limit of memory."""
    TIME = "time"
    """It reached a limit of time."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildOutcome:
    """The output of a child, and its end."""

    end: ChildEnd
    output: bytes


def run(
    module: str, question: bytes, limits: ChildLimits, into: BinaryIO | None = None
) -> ChildOutcome:
    """Run the module on the question, and wait for it: `limits.wall_s` at most.

    With `into`, the output is written to that file, and the outcome has none of it.

    Raises:
        OSError: no process could be started.

    """
    with TemporaryFile() as asked, TemporaryFile() as own_answer:
        answer = own_answer if into is None else into
        asked.write(question)
        asked.seek(0)
        child = subprocess.Popen(
            # -P: a folder of the module's name in the current one is not the module.
            [sys.executable, "-P", "-m", module],
            stdin=asked,
            stdout=answer,
            stderr=subprocess.DEVNULL,  # a traceback would quote the input
            env=environment_without_secrets(),
        )
        try:
            end = _wait(child, limits)
        finally:
            child.kill()
            child.wait()
        if into is not None:
            return ChildOutcome(end=end, output=b"")
        answer.seek(0)
        size = os.fstat(answer.fileno()).st_size  # read() allocates what it is asked for
        return ChildOutcome(end=end, output=answer.read(min(size, limits.output_bytes)))


def _wait(child: "subprocess.Popen[bytes]", limits: ChildLimits) -> ChildEnd:
    for _ in range(int(limits.wall_s / _POLL_S)):
        try:
            code = child.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            if (footprint_bytes(child.pid) or 0) > limits.memory_bytes:
                return ChildEnd.MEMORY
            continue
        if code in _OUT_OF_TIME:
            return ChildEnd.TIME
        if code in _OUT_OF_MEMORY:
            return ChildEnd.MEMORY
        return ChildEnd.FAILED if code else ChildEnd.DONE
    return ChildEnd.TIME


def serve(answer: Callable[[bytes, BinaryIO], None], limits: ChildLimits) -> None:
    """Answer the question on stdin, within the limits: the main function of a child."""
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.output_bytes, limits.output_bytes))
    disable_core_dumps()
    # A child whose parent was killed ends, too.
    signal.alarm(int(limits.wall_s) + 1)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    try:
        answer(sys.stdin.buffer.read(), sys.stdout.buffer)
        sys.stdout.buffer.flush()
    except MemoryError:
        sys.exit(_EXIT_MEMORY)
