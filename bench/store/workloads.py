"""Workloads of each client, and their figures. Every figure is a number."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from bench.store.client import Told
from bench.store.leases import leases
from bench.store.meter import Stage

Figures = dict[str, float]
_VALUE = b"v" * 256
_KEYS = 100


async def repeated(
    stage: Stage, act: Callable[[int], Awaitable[object]], *, at_once: int, seconds: float
) -> Figures:
    """Act again and again, so many at once, for a while; the first of each opens connections."""
    numbers = iter(range(1_000_000_000))

    async def until(deadline_s: float) -> int:
        count = 0
        while not count or time.perf_counter() < deadline_s:
            await act(next(numbers))
            count += 1
        return count

    await asyncio.gather(*(until(0) for _ in range(at_once)))
    with stage.meter() as meter:
        deadline_s = time.perf_counter() + seconds
        count = sum(await asyncio.gather(*(until(deadline_s) for _ in range(at_once))))
    return {
        "per_s": count / meter.elapsed_s,
        "python_us": meter.python_s / count * 1e6,
        "etcd_us": meter.etcd_s / count * 1e6,
    }


async def puts(stage: Stage, *, at_once: int, seconds: float) -> Figures:
    def put(number: int) -> Awaitable[None]:
        return stage.client.put(f"{stage.folder}{number % _KEYS:03}", _VALUE)

    return await repeated(stage, put, at_once=at_once, seconds=seconds)


async def gets(stage: Stage, *, at_once: int, seconds: float) -> Figures:
    await asyncio.gather(
        *(stage.client.put(f"{stage.folder}{number:03}", _VALUE) for number in range(_KEYS))
    )

    async def get(number: int) -> None:
        assert await stage.client.get(f"{stage.folder}{number % _KEYS:03}") == _VALUE

    return await repeated(stage, get, at_once=at_once, seconds=seconds)


async def lists(stage: Stage, *, prefix: str, count: int) -> Figures:
    """List, and then decode, both measured by themselves; then the whole as our processes do it, if it is ours."""
    with stage.meter() as wire:
        decode = await stage.client.list(prefix)
    with stage.meter() as decoding:
        deployments = decode()
    assert len(deployments) == count, f"{len(deployments)} objects of {count}"
    cpu_s = wire.python_s + decoding.python_s
    whole_s, whole_cpu_s = wire.elapsed_s + decoding.elapsed_s, cpu_s
    if (read := getattr(stage.client, "objects", None)) is not None:
        del decode, deployments
        with stage.meter() as whole:
            assert await read(prefix) == count
        whole_s, whole_cpu_s = whole.elapsed_s, whole.python_s
    return {
        "wire_ms": wire.elapsed_s * 1e3,
        "wire_python_ms": wire.python_s * 1e3,
        "etcd_ms": wire.etcd_s * 1e3,
        "decode_ms": decoding.python_s * 1e3,
        "whole_ms": whole_s * 1e3,
        "whole_python_ms": whole_cpu_s * 1e3,
        "decode_share_of_time": decoding.elapsed_s / (wire.elapsed_s + decoding.elapsed_s),
        "decode_share_of_cpu": decoding.python_s / cpu_s,
    }


@asynccontextmanager
async def watching(stage: Stage, how: str, prefix: str, seen: list[Told]) -> AsyncIterator[None]:
    """Open one watch (or informer) for each listener."""
    follow = getattr(stage.client, how)
    opened = [asyncio.Event() for _ in seen]
    tasks = [
        asyncio.create_task(follow(prefix, event.set, told))
        for event, told in zip(opened, seen, strict=True)
    ]
    try:
        async with asyncio.timeout(10):
            await asyncio.gather(*(event.wait() for event in opened))
        await asyncio.sleep(0.1)  # some clients say it before etcd does
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def latency(stage: Stage, *, count: int, document: str) -> Figures:
    """From a put being asked for to its handler being called, one after the other."""
    prefix, times_ms, arrived = f"{stage.folder}latency/", [], asyncio.Event()
    async with watching(stage, "inform", prefix, [arrived.set]):
        for number in range(count + 10):
            arrived.clear()
            began_s = time.perf_counter()
            async with asyncio.timeout(5), asyncio.TaskGroup() as group:
                group.create_task(_put(stage, f"{prefix}{number % 10}", document))
                await arrived.wait()
                times_ms.append((time.perf_counter() - began_s) * 1e3)
    cuts = statistics.quantiles(times_ms[10:], n=100, method="inclusive")
    return {"p50_ms": cuts[49], "p99_ms": cuts[98]}


async def _put(stage: Stage, key: str, document: str) -> None:
    await stage.client.put(key, document.encode())


async def fanout(stage: Stage, *, how: str, watchers: int, count: int, document: str) -> Figures:
    """Put, 16 at once, until every watcher has seen everything."""
    prefix, expected, delivered = f"{stage.folder}fanout-{how}/", watchers * count, 0
    everything = asyncio.Event()

    def seen() -> None:
        nonlocal delivered
        delivered += 1
        if delivered == expected:
            everything.set()

    numbers = iter(range(count))

    async def put_some() -> None:
        for number in numbers:
            await _put(stage, f"{prefix}{number:04}", document)

    async with watching(stage, how, prefix, [seen] * watchers):
        delivered = 0  # an informer also tells what was there
        with stage.meter() as meter, suppress(TimeoutError):
            async with asyncio.timeout(20):
                await asyncio.gather(*(put_some() for _ in range(16)))
                await everything.wait()
    return {
        "seconds": meter.elapsed_s,
        "python_s": meter.python_s,
        "etcd_s": meter.etcd_s,
        "lost": expected - delivered,
    }


WORKLOADS: Mapping[str, Callable[..., Awaitable[dict[str, Any]]]] = {
    "puts": puts,
    "gets": gets,
    "lists": lists,
    "latency": latency,
    "fanout": fanout,
    "leases": leases,
}
