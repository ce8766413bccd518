"""Engines that die, stop, drain and go mad under load, and hostile clients, behind our gateway and nginx.

`make bench-gateway-faults`, in five minutes. Whole answers (50 ms) and streams (64 events, 10 ms apart) are asked for at
once, each by as many connections as said, while one engine has its fault. Every answer's text is compared with what it
must be. `gap` is the longest that any stream paused, `first` the longest that one took to begin, `slowest` the longest
whole answer. Both give a silent engine 1 s. In the last runs of ours its etcd is dead.

Then hostile clients beside four honest ones: p50 and p99 are those of the honest ones, over those without the crowd, whose
clients share the cores with the gateway. The last line is JSON.
"""

import asyncio
import resource
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import uvloop
from tabulate import tabulate

from bench.gateway.load import Engine, Load, Records, compiled, counts, start_engines
from bench.gateway.peers import KEY, NGINX, OURS, Peer, start, start_ours
from bench.harness import finish, recorded, rss_mb, sized
from schemas.routing import Timeouts

_OPTIONS = ("delay_us=50000", "pace_us=10000")
_BEFORE_S, _AGAIN_S, _SETTLE_S = 0.7, 5.0, 15.0
_CONNECTIONS = sized((16, 64), smoke=(4,))
_PATIENCE = Timeouts(attempt="1s", first_token="1s")
_HONEST_S = sized(2.0, smoke=0.3)
_ATTACKERS, _PAUSE_S, _CALM_S = 8, 0.02, 1.5
NEVER = float("inf")
Crowd: TypeAlias = Callable[[int], AbstractAsyncContextManager[None]]
"""Hostile clients of a port, for as long as the context lasts."""


async def used_again(engine: Engine, served: float) -> float:
    """Return the seconds until the engine has served more than so many; NEVER if it does not in time."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + _AGAIN_S:
        if engine.stat("served") > served:
            return time.monotonic() - began_s
        await asyncio.sleep(0.01)
    return NEVER


async def _restarted(engine: Engine) -> float:
    engine.start()
    return await used_again(engine, 0)


async def _kill(engine: Engine) -> float:
    engine.end()
    await asyncio.sleep(1.0)
    return await _restarted(engine)


async def _stop(engine: Engine) -> float:
    served = engine.stat("served")
    engine.signal(signal.SIGSTOP)
    await asyncio.sleep(2.5)
    engine.signal(signal.SIGCONT)
    return await used_again(engine, served)


async def _drain(engine: Engine) -> float:
    engine.signal(signal.SIGTERM)
    await asyncio.sleep(1.2)
    engine.end()
    return await _restarted(engine)


def _mad(mode: str, seconds: float) -> Callable[[Engine], Awaitable[float]]:
    async def act(engine: Engine) -> float:
        engine.set(f"fault/{mode}")
        await asyncio.sleep(seconds)
        served = engine.stat("served")
        engine.set("fault/none")
        return await used_again(engine, served)

    return act


FAULTS: dict[str, tuple[float, Callable[[Engine], Awaitable[float]] | None]] = {
    "none": (0.3, None),
    "kill": (1.0, _kill),
    "stop": (2.5, _stop),
    "drain": (1.2, _drain),
    # Health checks are answered meanwhile, so one request is tried during the fault, and the next 1.5 to 2.5 s later.
    "blackhole": (5.3, _mad("blackhole", 2.5)),
    "garbage": (0.8, _mad("garbage", 0.8)),
    "half": (0.8, _mad("half", 0.8)),
    "length": (0.8, _mad("length", 0.8)),
}
"""Faults of one engine: their length, and the act that does and undoes it and returns the seconds until it is used."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The effects of one fault."""

    fault: str
    requests: int
    ends: dict[str, int]
    """Requests by kind and end, those that did not end well."""
    truncated: int
    """Streams that ended early, with an error or without."""
    wrong: int
    """Streams and answers with another text than the reference."""
    pause_ms: float
    """The longest that any stream paused or took to begin."""
    slowest_ms: float
    """The longest whole answer."""
    resumed: int
    again_s: float | None
    """Seconds from the engine being well to its next request; None if nothing was done."""

    @property
    def failed(self) -> int:
        return sum(self.ends.values())


def _longest_ms(records: Records, name: str) -> float:
    return round(float(records[name].max(initial=0)) * 1000, 1)


async def under_load(
    programs: Path, peer: Peer, engines: Sequence[Engine], connections: int, fault: str
) -> Outcome:
    """Load the gateway with both kinds of requests, and have one engine fail meanwhile."""
    lasts_s, act = FAULTS[fault]
    seconds = _BEFORE_S + lasts_s + 1.2
    whole, stream = (
        Load(
            port=peer.port,
            connections=connections,
            seconds=seconds,
            is_streamed=is_streamed,
            key=peer.key,
        )
        for is_streamed in (False, True)
    )
    before = sum(engine.stat("resumed") for engine in engines[1:])

    async def have_fault() -> float | None:
        await asyncio.sleep(_BEFORE_S)
        return None if act is None else await act(engines[0])

    wholes, streams, again_s = await asyncio.gather(
        whole.run(programs), stream.run(programs), have_fault()
    )
    ends = {
        f"{kind} {end}": n
        for kind, records in (("whole", wholes), ("stream", streams))
        for end, n in counts(records).items()
        if end != "ok"
    }
    return Outcome(
        fault=fault,
        requests=len(wholes) + len(streams),
        ends=ends,
        truncated=sum(ends.get(f"stream {end}", 0) for end in ("truncated", "broken", "silent")),
        wrong=sum(ends.get(f"{kind} wrong", 0) for kind in ("whole", "stream")),
        pause_ms=max(_longest_ms(streams, "gap_s"), _longest_ms(streams, "first_s")),
        slowest_ms=_longest_ms(wholes, "whole_s"),
        resumed=int(sum(engine.stat("resumed") for engine in engines[1:]) - before),
        again_s=again_s,
    )


async def settle(programs: Path, peer: Peer, engines: Sequence[Engine]) -> None:
    """Repair all engines, and load the gateway until all of them are used again."""
    for engine in engines:
        engine.revive()
    until_s = time.monotonic() + _SETTLE_S
    load = Load(port=peer.port, connections=8, seconds=0.2, key=peer.key)
    while time.monotonic() < until_s:
        before = [engine.stat("served") for engine in engines]
        await load.run(programs)
        if all(e.stat("served") > was for e, was in zip(engines, before, strict=True)):
            return
    print(f"{peer.name}: an engine is not used again; what follows is without it", flush=True)


async def suffer(
    programs: Path, name: str, peer: Peer, engines: Sequence[Engine], concurrencies: Sequence[int]
) -> dict[str, Any]:
    """Return the sums of what every fault does."""
    outcomes = []
    for connections in concurrencies:
        for fault in sized(tuple(FAULTS), smoke=("none", "kill")):
            await settle(programs, peer, engines)
            outcome = await under_load(programs, peer, engines, connections, fault)
            outcomes.append(outcome)
            print(f"{name:18} c={connections:<3} {outcome}", flush=True)
    requests, failed = (sum(getattr(o, what) for o in outcomes) for what in ("requests", "failed"))
    again = [outcome.again_s for outcome in outcomes if outcome.again_s is not None]
    return {
        "requests": requests,
        "failed_requests": failed,
        "truncated_streams": sum(outcome.truncated for outcome in outcomes),
        "wrong_texts": sum(outcome.wrong for outcome in outcomes),
        # Of requests during and around the faults, which are far more frequent than on any fleet.
        "answered_percent": round(100 - 100 * failed / max(1, requests), 3),
        "resumed": sum(outcome.resumed for outcome in outcomes),
        "slowest_again_s": round(max((s for s in again if s != NEVER), default=0.0), 2),
        "never_again": sum(seconds == NEVER for seconds in again),
        "pause_ms": {
            fault: max(outcome.pause_ms for outcome in outcomes if outcome.fault == fault)
            for fault in dict.fromkeys(outcome.fault for outcome in outcomes)
        },
    }


def idle(count: int, said: bytes, settle_s: float = 0.0) -> Crowd:
    """Connections that send this, and then nothing, and read nothing; it may take a while until the gateway has read all."""

    @asynccontextmanager
    async def crowd(port: int) -> AsyncIterator[None]:
        writers = []
        for _ in range(count):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            sock.setblocking(False)  # noqa: FBT003 - its only parameter
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            _, writer = await asyncio.open_connection(sock=sock)
            writer.write(said)
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a ReadTransport, too
            writers.append(writer)
        await asyncio.sleep(settle_s)
        try:
            yield
        finally:
            for writer in writers:
                writer.transport.abort()

    return crowd


def shooting(shot: bytes) -> Crowd:
    """Clients that send this again and again, each on a new connection."""

    async def shoot(port: int) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(shot)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE_S):
                        await reader.read(1000)
                writer.transport.abort()
            await asyncio.sleep(_PAUSE_S)

    @asynccontextmanager
    async def crowd(port: int) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(shoot(port)) for _ in range(_ATTACKERS)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    return crowd


def crowds() -> dict[str, Crowd]:
    """Return the crowds by what they do."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    count = min(sized(10_000, smoke=200), limit - 500)
    line = b"POST /v1/chat/completions HTTP/1.1\r\n"
    head = line + b"host: x\r\nauthorization: Bearer %b\r\n" % KEY.encode()

    def post(body: bytes) -> bytes:
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)

    stream = post(b'{"model":"talk","stream":true,"messages":[]}')
    double = b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    return {
        f"{count} idle": idle(count, b""),
        f"{count // 10} in a head": idle(count // 10, line + b"x-a: b"),
        # More than 10 MB each, of which the kernel keeps some.
        "16 that do not read": idle(16, stream, settle_s=sized(8.0, smoke=1.0)),
        "deep JSON, 100 kB": shooting(post(b'{"model":"bench","messages":' + b"[" * 100_000)),
        "header bombs, 64 kB": shooting(head + b"x-a: %b\r\n" % (b"a" * 1000) * 64),
        "smuggling": shooting(head + double),
        "half requests": shooting(post(b" " * 200_000)[:100_000]),
        "wrong keys": shooting(post(b'{"model":"bench"}').replace(KEY.encode(), b"sk-fleet-wrong")),
    }


async def beside_crowds(programs: Path, folder: Path) -> dict[str, Any]:
    """Return what honest clients notice of each crowd, over a baseline of its own: the machine may be shared."""
    rows: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        fleet = {
            "bench": start_engines(stack, programs, 1, "delay_us=2000"),
            "talk": start_engines(stack, programs, 1, "tokens=60000", name="talk"),
        }
        peer = await start_ours(stack, folder / "crowds", fleet)
        load = Load(port=peer.port, connections=4, seconds=_HONEST_S, key=KEY)

        async def honest() -> list[float]:
            records = await load.run(programs)
            well = records[records["outcome"] == 0]["whole_s"]
            p50, p99 = (float(np.percentile(well, q)) for q in (50, 99))
            return [p50, p99, len(records) - len(well)]

        await honest()
        for name, crowd in crowds().items():
            base = await honest()
            async with crowd(peer.port):
                beside = await honest()
            ratios = [round(beside[n] / base[n], 2) for n in (0, 1)]
            rows[name] = [*ratios, beside[2], rss_mb(peer.pid)]
            await asyncio.sleep(_CALM_S)  # for the gateway to close thousands of connections
    columns = ["p50 ratio", "p99 ratio", "failed", "RSS MB"]
    print(tabulate([[name, *row] for name, row in rows.items()], headers=["beside", *columns]))
    return {
        name: dict(zip(("p50_ratio", "p99_ratio", "failed", "rss_mb"), row, strict=True))
        for name, row in rows.items()
    }


async def main() -> None:
    """Measure and print."""
    failed: dict[str, str] = {}
    settings: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as path:
        folder = Path(path)
        programs = compiled(folder)
        for count in sized((2, 3), smoke=(2,)):
            async with AsyncExitStack() as stack:
                engines = start_engines(stack, programs, count, *_OPTIONS)
                own = folder / f"ours-{count}"
                peer = await start_ours(stack, own, {"bench": engines}, _PATIENCE)
                name = f"{OURS}, {count} engines"
                settings[name] = await suffer(programs, name, peer, engines, _CONNECTIONS)
                if count == 2 and peer.etcd is not None:
                    await peer.etcd.supervisor.stop()
                    name = f"{OURS}, etcd dead"
                    settings[name] = await suffer(programs, name, peer, engines, _CONNECTIONS[:1])
        async with AsyncExitStack() as stack:
            engines = start_engines(stack, programs, 2, *_OPTIONS)
            with recorded(failed, NGINX):
                peer = await start(stack, folder, NGINX, engines)
                settings[NGINX] = await suffer(programs, NGINX, peer, engines, _CONNECTIONS[:1])
        beside = await beside_crowds(programs, folder)
    rows = [[name, *sums.values()] for name, sums in settings.items()]
    print(tabulate(rows, headers=["gateway", *next(iter(settings.values()))]))
    ours = [sums for name, sums in settings.items() if name.startswith(OURS)]
    names = ("requests", "failed_requests", "truncated_streams", "wrong_texts", "never_again")
    compared = {name: sum(sums[name] for sums in ours) for name in names}
    compared["worst_p99_ratio_beside_crowds"] = max(row["p99_ratio"] for row in beside.values())
    finish("gateway-faults", compared, {"settings": settings, "crowds": beside}, failed=failed)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
