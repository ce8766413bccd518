"""The fork server: a process that has the tokenizer, and forks a worker for each lane.

It handles no input of requests itself, so it stays sound whatever happens to a worker, and a new worker costs a fork:
milliseconds, and only the memory that it changes. It has one thread and imports no mlx. It ends, with all workers, when
the serving process does.

transformers imports numpy, whose macOS wheel runs some of Accelerate at its import, and psutil links CoreFoundation and
IOKit: such frameworks may not survive a fork (numpy#5752). So pool.py keeps Accelerate at one thread, and no worker calls
them. No Mac has shown yet that this is enough.
"""

import contextlib
import gc
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from engine import errors
from engine.errors import GrammarError, RefusedError
from engine.grammar import llguidance_backend
from engine.grammar.interface import GrammarCompiler
from engine.input_workers import wire
from engine.input_workers.wire import WorkerLimits
from engine.model import import_cache
from engine.openai import prompt_encoder
from engine.openai.input_tasks import LANES, Lane
from engine.text.codec import TextCodec
from engine.text.portable_tokenizer import PortableTokenizer
from machinery.process_secrets import disable_core_dumps

_PID: Final = struct.Struct("<q")
_SIZE: Final = struct.Struct("<Q")
_IS_LINUX: bool = sys.platform == "linux"
_ERROR_FD: Final = 2
_TEXT: Final = "hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """Parts of the loaded model that workers need; can be pickled."""

    tokenizer: PortableTokenizer
    is_constrainable: bool
    limits: WorkerLimits


@dataclass(slots=True, kw_only=True)
class ForkServer:
    """Forks workers, and reaps them: their pids stay theirs until the serving process has seen how they ended."""

    control: socket.socket
    codec: TextCodec
    grammars: GrammarCompiler | None
    limits: WorkerLimits
    children: set[int] = field(default_factory=set)

    def serve(self) -> None:
        """Carry out commands until the serving process ends or closes the connection."""
        # Objects of the model stay as they are: a collection in a worker would copy their pages.
        gc.collect()
        gc.freeze()
        self.control.sendall(wire.READY)
        while True:
            raw, fds, _, _ = socket.recv_fds(self.control, wire.COMMAND_BYTES, 1)
            if len(raw) < wire.COMMAND_BYTES:
                return
            name, argument = wire.decode_command(raw)
            if name == b"F":
                self._fork(LANES[argument], socket.socket(fileno=fds[0]))
            elif name == b"R" and argument in self.children:
                self.children.discard(argument)
                _, status = os.waitpid(argument, 0)
                self.control.sendall(_PID.pack(os.waitstatus_to_exitcode(status)))
            else:
                self.control.sendall(_PID.pack(0))

    def _fork(self, lane: Lane, connection: socket.socket) -> None:
        if lane is Lane.GRAMMAR and self.grammars is not None:
            with contextlib.suppress(GrammarError):  # the worker says so itself
                self.grammars.prepare()  # once, and not in every worker
        pid = os.fork()
        if pid == 0:
            self.control.close()
            # Answer requests until the connection ends.
            code = 1
            try:
                # What a library writes when it fails may quote a prompt.
                os.dup2(os.open(os.devnull, os.O_WRONLY), _ERROR_FD)
                if lane is not Lane.SHORT:
                    os.nice(self.limits.niceness)
                if _IS_LINUX:
                    most = psutil.Process().memory_info().vms + self.limits.memory_of(lane)
                    resource.setrlimit(resource.RLIMIT_AS, (most, most))
                while _answer(connection, self):
                    pass
                code = 0
            except OSError:
                code = 0  # the serving process has closed the connection
            finally:
                os._exit(code)
        connection.close()
        self.children.add(pid)
        self.control.sendall(_PID.pack(pid))


def _answer(connection: socket.socket, server: ForkServer) -> bool:
    """Answer one request; return False if there is none any more."""
    head = _read(connection, wire.REQUEST_HEAD_BYTES)
    if not head:
        return False
    cpu_s, size = wire.decode_request_head(head)
    raw = _read(connection, size)
    # The kernel ends this process, in whatever code it is, even if nothing is left that would look after it.
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    answer = _prepare(bytes(raw), server)
    signal.setitimer(signal.ITIMER_PROF, 0)
    connection.sendall(answer)
    return True


def _prepare(raw: bytes, server: ForkServer) -> bytes:
    try:
        task = pickle.loads(raw)  # noqa: S301 - the serving process's own
        prompts = prompt_encoder.run(task, server.codec, server.grammars)
        return wire.encode_answer(prompts)
    except RefusedError as error:
        return wire.encode_refusal(error.refusal)
    except MemoryError:
        return wire.encode_refusal(errors.input_too_costly("too much memory").refusal)
    except Exception as error:  # noqa: BLE001 - the edge of the process
        # The edge of the worker: the next request gets an answer.
        return wire.encode_refusal(
            errors.internal(f"The engine failed: {errors.summarize(error)}").refusal
        )


def _read(connection: socket.socket, size: int) -> bytearray:
    """Return so many bytes; fewer at the end of the connection."""
    found = bytearray(size)
    view = memoryview(found)
    count = 0
    while count < size and (more := connection.recv_into(view[count:])):
        count += more
    view.release()
    return found if count == size else bytearray()


def send_model(model: WorkerModel) -> bytes:
    """Return the bytes that a new fork server reads first."""
    raw = pickle.dumps(model)
    return _SIZE.pack(len(raw)) + raw


def main() -> None:
    """Read the model from the connection on stdin, and serve; the argument is the folder of the import cache."""
    disable_core_dumps()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    head = _read(control, _SIZE.size)
    if not head:
        return
    (size,) = _SIZE.unpack(head)
    import_cache.install(Path(sys.argv[1]))  # the tokenizer brings transformers
    model: WorkerModel = pickle.loads(_read(control, size))  # noqa: S301 - the same
    codec = TextCodec(model.tokenizer)
    codec.encode_text(_TEXT)  # what is loaded at first use
    grammars = None
    if model.is_constrainable:
        grammars = llguidance_backend.make_compiler(codec.serialized, codec.eos_ids)
    server = ForkServer(control=control, codec=codec, grammars=grammars, limits=model.limits)
    try:
        server.serve()
    finally:
        # Workers are in its session, and may be busy with a request that nobody waits for.
        os.killpg(0, signal.SIGKILL)
