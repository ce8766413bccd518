"""Runs fleetctl commands in the test's own process, against a store in memory.

A command runs in a thread with an event loop of its own, as in its own process; its standard streams, arguments and
exit code are the real ones. The store (`store.memory`, which passes the store's contract suite) stays in the test's
event loop. Not for commands that need signals, a terminal, or an etcd of their own: those run as real processes
(`tests.support.fleet.fleetctl`).
"""

import asyncio
import contextlib
import contextvars
import importlib
import io
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from itertools import count
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from machinery.clock import SystemClock
from store.etcd.address import EtcdAddress
from store.memory import MemoryTransport
from store.port import Guard, KeyValue, Listing, Operation, ServerStatus, Transport, WatchBatch
from tests.support.fleet import Done, Fleet

T = TypeVar("T")

_numbers = count(1)
_stores: "WeakValueDictionary[str, LoopBoundTransport]" = WeakValueDictionary()
"""The stores in memory that commands can reach, by their URL; each lives as long as its fleet."""


class MemoryFleet:
    """A store in memory, and fleetctl against it. For the tests of verbs: `await fleet.ctl("get", "nodes")`."""

    def __init__(self) -> None:
        self.store = MemoryTransport(SystemClock())
        self.url = f"http://memory-{next(_numbers)}.invalid:2379"
        self._reachable: LoopBoundTransport | None = None

    async def ctl(self, *words: str, stdin: bytes = b"", limit_s: float = 60.0) -> Done:
        """Run fleetctl against this store; raise what a real process would print as a traceback."""
        if self._reachable is None:
            self._reachable = LoopBoundTransport(self.store, asyncio.get_running_loop())
            _stores[self.url] = self._reachable
        with _stores_reachable():
            return await run_fleetctl(*words, "--etcd", self.url, stdin=stdin, limit_s=limit_s)

    def vanish(self) -> None:
        """Let later commands find no store at the URL, as when etcd is away."""
        _stores.pop(self.url, None)

    async def applied(self, manifest: str) -> None:
        """Apply a manifest given as text."""
        done = await self.ctl("apply", "-f", "-", stdin=manifest.encode())
        assert done.code == 0, done.err


CommandFleet: TypeAlias = Fleet | MemoryFleet
"""A fleet of either kind, for helpers that only run commands."""


async def run_fleetctl(*words: str, stdin: bytes = b"", limit_s: float = 60.0) -> Done:
    """Run fleetctl in a thread of this process; return its exit code and its output."""
    streams = _Streams(stdin)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def work() -> None:
        try:
            code = _run_command(streams, words)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            loop.call_soon_threadsafe(_settle, ended, 0, error)
        else:
            loop.call_soon_threadsafe(_settle, ended, code, None)

    context = contextvars.copy_context()
    with _streams_routed(), _signals_ignored():
        # A daemon: a command that hangs must not keep the test run from ending.
        threading.Thread(target=context.run, args=(work,), daemon=True).start()
        async with asyncio.timeout(limit_s):
            code = await ended
    return Done(code=code, out=streams.text(streams.out), err=streams.text(streams.err))


def _settle(ended: asyncio.Future[int], code: int, error: BaseException | None) -> None:
    if ended.done():  # the test has given up
        return
    if error is None:
        ended.set_result(code)
    else:
        ended.set_exception(error)


def _run_command(streams: "_Streams", words: Sequence[str]) -> int:
    main = importlib.import_module("fleetctl.__main__").main
    _current.set(streams)
    try:
        main.main(args=list(words), prog_name="fleetctl")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


class _Streams:
    """The standard streams of one command."""

    def __init__(self, stdin: bytes) -> None:
        self.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        self.out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        self.err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)

    def text(self, stream: io.TextIOWrapper) -> str:
        stream.flush()
        buffer = stream.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode()


_current: contextvars.ContextVar[_Streams | None] = contextvars.ContextVar("streams", default=None)


class _RoutedStream:
    """A standard stream that belongs to the command in whose context it is used, else to the process."""

    def __init__(self, original: Any, pick: Callable[[_Streams], Any]) -> None:
        self._original = original
        self._pick = pick

    def __getattr__(self, name: str) -> Any:
        streams = _current.get()
        return getattr(self._original if streams is None else self._pick(streams), name)

    def __iter__(self) -> Iterator[str]:
        streams = _current.get()
        return iter(self._original if streams is None else self._pick(streams))


class _Nested:
    """A change to the process that lasts while at least one command runs."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make
        self._depth = 0
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if not self._depth:
            self._stack.enter_context(self._make())
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._stack.close()


@contextlib.contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def _route_streams() -> Iterator[None]:
    with (
        _replaced(sys, "stdin", _RoutedStream(sys.stdin, lambda s: s.stdin)),
        _replaced(sys, "stdout", _RoutedStream(sys.stdout, lambda s: s.out)),
        _replaced(sys, "stderr", _RoutedStream(sys.stderr, lambda s: s.err)),
    ):
        yield


@contextlib.contextmanager
def _ignore_signals() -> Iterator[None]:
    """Let `edit` set its handler of Ctrl-C in a thread, where Python refuses that."""
    set_handler = signal.signal

    def set_in_main_thread(number: Any, handler: Any) -> Any:
        is_main = threading.current_thread() is threading.main_thread()
        return set_handler(number, handler) if is_main else signal.SIG_DFL

    with _replaced(signal, "signal", set_in_main_thread):
        yield


@contextlib.contextmanager
def _reach_stores() -> Iterator[None]:
    """Make the addresses of stores in memory lead to them; all other addresses lead to etcd.

    What `connect` calls is replaced, and not `connect` itself: verbs that were imported before hold on to that.
    """
    adapters = importlib.import_module("store.etcd.connect")
    adapter = adapters._adapter

    def memory_adapter(address: EtcdAddress, *options: Any) -> Any:
        store = _stores.get(str(address))
        return adapter(address, *options) if store is None else store

    with _replaced(adapters, "_adapter", memory_adapter):
        yield


_streams_routed = _Nested(_route_streams)
_signals_ignored = _Nested(_ignore_signals)
_stores_reachable = _Nested(_reach_stores)


class LoopBoundTransport:
    """A transport for commands: each call runs in the event loop that the store belongs to."""

    def __init__(self, store: Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop

    async def get(self, key: str) -> KeyValue | None:
        return await self._call(self._store.get(key))

    async def list(self, prefix: str) -> Listing:
        return await self._call(self._store.list(prefix))

    async def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        async for page in self._stream(self._store.pages(prefix)):
            yield page

    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        return await self._call(self._store.commit(guards, operations))

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[WatchBatch]:
        async for batch in self._stream(self._store.watch(prefix, after_revision=after_revision)):
            yield batch

    async def grant(self, ttl_s: int) -> int:
        return await self._call(self._store.grant(ttl_s))

    async def keep_alive(self, lease: int) -> int:
        return await self._call(self._store.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        await self._call(self._store.revoke(lease))

    async def status(self) -> ServerStatus:
        return await self._call(self._store.status())

    async def close(self) -> None:
        return

    async def _call(self, work: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await work

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(awaited(), self._loop))

    async def _stream(self, stream: AsyncGenerator[T]) -> AsyncGenerator[T]:
        try:
            while (item := await self._call(_next(stream))) is not None:
                yield item
        finally:
            await self._call(_closed(stream))


async def _next(stream: AsyncGenerator[T]) -> T | None:
    return await anext(stream, None)


async def _closed(stream: AsyncGenerator[Any]) -> None:
    """Close a stream; a call that was just cancelled may still hold it for a turn of the loop."""
    while True:
        try:
            return await stream.aclose()
        except RuntimeError:
            await asyncio.sleep(0)
