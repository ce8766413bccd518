"""Cost of one request in our gateway without sockets: files, calls, bytecodes, and microseconds of hot code.

The counts depend on no other load of the machine. A whole gateway runs in this process, with its table and its key from a
store in memory; only the transports of its connections are replaced by ones that hand the bytes over at once.

`python -m bench.gateway.request_path [CASE]`: of a case that is named, the files and functions that it passes are listed.
"""

import asyncio
import gc
import itertools
import json
import random
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import uvicorn
import uvloop
from typing_extensions import override
from uvicorn.server import ServerState

from bench.gateway import ours
from bench.result import arguments, finish, sized
from gateway.http.protocol import ClientProtocol
from gateway.server import Gateway, GatewayLimits
from machinery.clock import SystemClock
from schemas.routing import Timeouts
from store.memory import MemoryTransport

_MODEL: Final = "bench"
_EVENTS: Final = 64
_WARM, _COUNTED = sized(1000, smoke=100), sized(100, smoke=20)
_TIMED = sized(6000, smoke=400)
_SYNC_S: Final = 10.0
_CONVERSATIONS: Final = 64
_ROOT: Final = str(Path(__file__).parents[2])
_BENCH: Final = f"{_ROOT}/bench/"


@dataclass(frozen=True)
class Engine:
    """An engine of the table; nothing listens there."""

    replica: str
    port: int


_ENGINES: Final = (Engine("bench-0", 9101), Engine("bench-1", 9102))


class Transport(asyncio.Transport):
    """A transport without a socket: what is written goes to `on_write`."""

    def __init__(self, on_write: Callable[[bytes], object]) -> None:
        super().__init__()
        self._on_write = on_write
        self._socket = socket.socket()

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._on_write(bytes(data))

    @override
    def is_closing(self) -> bool:
        return False

    @override
    def abort(self) -> None:
        raise AssertionError("no connection ends here")

    @override
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "socket":
            return self._socket
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    @override
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return


class Loop(uvloop.Loop):
    """A loop whose connections to engines have no sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[asyncio.Protocol] = []
        """The connections that have sent a request which is not answered yet."""

    @override
    async def create_connection(self, factory: Callable[[], Any], *_: Any, **__: Any) -> Any:  # type: ignore[override]  # the one form in use
        protocol = factory()
        transport = Transport(lambda _: self.asked.append(protocol))
        protocol.connection_made(transport)
        return transport, protocol


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of request, and the reads of the socket in which its answer arrives."""

    name: str
    reads: Sequence[bytes]
    is_streamed: bool = False
    turns: int = 1
    has_fresh_heads: bool = False

    def requests(self) -> Iterator[bytes]:
        """Yield requests: of 64 conversations in turn, forever."""
        for number in itertools.count():
            yield _request(self, number)


def _request(case: Case, number: int) -> bytes:
    text = f"conversation {number // case.turns % _CONVERSATIONS}: " + "Lorem ipsum dolor. " * 45
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": text},
    ]
    if number % case.turns:
        messages += [
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "and then?"},
        ]
    fields = {"model": _MODEL, "messages": messages, "max_tokens": 64, "stream": case.is_streamed}
    body = json.dumps(fields, separators=(",", ":")).encode()
    fresh = (
        b"x-request-id: req-%08x\r\ntraceparent: 00-%032x-%016x-01\r\n"
        % (number, number + 1, number + 1)
        if case.has_fresh_heads
        else b""
    )
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nUser-Agent: bench\r\n"
        b"Accept: application/json\r\nAuthorization: Bearer %b\r\n"
        b"Content-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b"
        % (ours.KEY.encode(), fresh, len(body), body)
    )


def _whole() -> Sequence[bytes]:
    usage = {
        "prompt_tokens": 200,
        "completion_tokens": 64,
        "total_tokens": 264,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    message = {"role": "assistant", "content": "the quick brown fox jumps over " * 8}
    answer = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1700000000,
        "model": _MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": usage,
    }
    body = json.dumps(answer, separators=(",", ":")).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return (head % len(body) + body,)


def _stream() -> Sequence[bytes]:
    """Return a stream of events with resume comments, each in a read of its own."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    reads = [_chunk(number) for number in range(_EVENTS)]
    done = b"data: [DONE]\n\n"
    return (head + reads[0], *reads[1:-1], reads[-1] + b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done))


def _chunk(number: int) -> bytes:
    is_last = number == _EVENTS - 1
    comment: dict[str, Any] = {"tokens": [1000 + number]}
    if not number:
        comment |= {"seed": 7, "prompt": "00000001", "id": "x", "created": 1, "prompt_tokens": 200}
    if is_last:
        comment |= {
            "usage": {"prompt_tokens": 200, "completion_tokens": 64, "total_tokens": 264},
        }
    chunk = {
        "id": "chatcmpl-0123456789",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": _MODEL,
        "choices": [
            {
                "index": 0,
                "delta": {"content": f" word {number}"},
                "finish_reason": "stop" if is_last else None,
            }
        ],
    }
    texts = [json.dumps(one, separators=(",", ":")).encode() for one in (comment, chunk)]
    event = b": fleet %b\ndata: %b\n\n" % (texts[0], texts[1])
    return b"%x\r\n%b\r\n" % (len(event), event)


CASES: Final = (
    Case(name="whole", reads=_whole()),
    Case(name="fresh_heads", reads=_whole(), has_fresh_heads=True),
    Case(name="two_turns", reads=_whole(), turns=2),
    Case(name="stream", reads=_stream(), is_streamed=True),
)


class Client:
    """A connection to a gateway on which one request after another is answered."""

    def __init__(self, gateway: Gateway, loop: Loop, case: Case) -> None:
        self._gateway = gateway
        self._loop = loop
        self._reads = case.reads
        self._requests = case.requests()
        self.written: list[bytes] = []
        state = ServerState()
        state.default_headers = [(b"date", b"Thu, 26 Nov 2026 20:00:00 GMT")]
        config = uvicorn.Config(lambda _: None, log_config=None)
        config.load()
        self._protocol = ClientProtocol(gateway.handler, config, state, {}, loop)
        self._protocol.connection_made(Transport(self.written.append))

    async def ask(self, count: int) -> None:
        """Ask, and await the answers. A new connection to an engine takes turns of the loop; a kept one takes none."""
        self.ask_hot(count - 1)
        if count:
            self._protocol.data_received(next(self._requests))
            while not self._loop.asked:
                await asyncio.sleep(0)
            self._answer()
        self._gateway.recorder.count()

    def ask_hot(self, count: int) -> None:
        """Ask so often on connections that are open."""
        for request in itertools.islice(self._requests, max(0, count)):
            self._protocol.data_received(request)
            self._answer()

    def _answer(self) -> None:
        engine = self._loop.asked.pop()
        self.written.clear()
        for read in self._reads:
            engine.data_received(read)
        assert self.written[0].startswith(b"HTTP/1.1 200 OK\r\n"), self.written

    def time_us(self, count: int) -> list[float]:
        """Return the microseconds of each of so many requests, with the part of a request that is counted later."""
        found, now = [], time.perf_counter_ns
        for _ in range(count // _COUNTED):
            requests = list(itertools.islice(self._requests, _COUNTED))
            times = []
            for request in requests:
                began = now()
                self._protocol.data_received(request)
                self._answer()
                times.append(now() - began)
            began = now()
            self._gateway.recorder.count()
            each = (now() - began) / _COUNTED
            found += [(one + each) / 1000 for one in times]
        return found


def _is_ours(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith(_ROOT) and not name.startswith(_BENCH)


def _name(code: CodeType) -> str:
    return f"{code.co_filename[len(_ROOT) + 1 :]} {code.co_qualname}"


@dataclass(frozen=True)
class Counts:
    """Counts of one request, on average."""

    python_calls: Counter[str]
    """By file and function."""
    c_calls: int
    bytecodes: Counter[str]
    files: set[str]
    """The files that a request passes until it is answered."""
    files_later: set[str]
    """The further files that only count it afterwards, in slices."""


def _counted(answer: Callable[[], object], count_later: Callable[[], object]) -> Counts:
    """Count what both calls execute: the interpreter's own hooks, first for calls, then for bytecodes."""
    python: Counter[str] = Counter()
    bytecodes: Counter[str] = Counter()
    c_calls = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal c_calls
        if _is_ours(frame.f_code):
            if event == "call":
                python[_name(frame.f_code)] += 1
            elif event == "c_call":
                c_calls += 1

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not _is_ours(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            bytecodes[_name(frame.f_code)] += 1
        return trace

    sys.setprofile(profile)
    answer()
    files = _files(python)
    count_later()
    sys.setprofile(None)
    sys.settrace(trace)
    answer()
    count_later()
    sys.settrace(None)
    return Counts(python, c_calls, bytecodes, files, _files(python) - files)


def _files(calls: Counter[str]) -> set[str]:
    return {name.partition(" ")[0] for name in calls}


async def _synced(gateway: Gateway) -> None:
    async with asyncio.timeout(_SYNC_S):
        while not (gateway.fleet_state.keyring.is_known and gateway.table_cache.table.endpoints):
            await asyncio.sleep(0.01)


async def _measure(case: Case, *, lists: bool) -> dict[str, float]:
    clock, loop = SystemClock(), asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    store = MemoryTransport(clock)
    await ours.declare(store, {_MODEL: _ENGINES}, ours.Traits(Timeouts()))
    gateway = Gateway(
        store, clock, random.Random(1), GatewayLimits(asks_for_keys=True), url="http://127.0.0.1:1"
    )
    state = asyncio.create_task(gateway.fleet_state.run())
    await _synced(gateway)
    client = Client(gateway, loop, case)
    for _ in range(_CONVERSATIONS):  # until each engine has an open connection
        await client.ask(1)
    client.ask_hot(_WARM)
    gateway.recorder.count()

    counts = _counted(lambda: client.ask_hot(_COUNTED), gateway.recorder.count)
    await asyncio.sleep(1.1)  # for a sign of life of the store
    gc.collect()
    gc.freeze()
    gc.disable()
    times = client.time_us(_TIMED // (10 if case.is_streamed else 1))
    gc.enable()
    state.cancel()
    if lists:
        for name, count in sorted(counts.python_calls.items()):
            bytecodes = counts.bytecodes[name] / _COUNTED
            print(f"{count / _COUNTED:8.2f} calls {bytecodes:7.1f} bytecodes  {name}")
    return {
        "files": len(counts.files),
        "files_later": len(counts.files_later),
        "python_calls": round(counts.python_calls.total() / _COUNTED, 1),
        "c_calls": round(counts.c_calls / _COUNTED, 1),
        "bytecodes": round(counts.bytecodes.total() / _COUNTED),
        "hot_us": round(statistics.quantiles(times, n=10)[0], 1),
    }


def main() -> None:
    listed = arguments()
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        with asyncio.Runner(loop_factory=Loop) as runner:
            found[case.name] = runner.run(_measure(case, lists=case.name in listed))
        line = ", ".join(f"{value:g} {name}" for name, value in found[case.name].items())
        print(f"{case.name}: {line}", flush=True)
    finish("gateway-path", found, {"events_of_stream": _EVENTS})


if __name__ == "__main__":
    main()
