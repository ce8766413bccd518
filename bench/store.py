"""Our etcd clients beside aetcd and etcd3-py: `make bench-store`, under four minutes.

One real etcd with fsync. In each round every client does all cases in a process of its own, so that its processor time is
its own too. The last line is one JSON object, ratios first: `..._vs_fastest` compares rates and times with the fastest
peer (0.9 is ten percent slower), `..._cpu_vs_least` processor time with the cheapest (1.1 is ten percent more).
"""

import asyncio
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import uvloop
from tabulate import tabulate

from bench.harness import (
    ROOT,
    PeerError,
    arguments,
    child,
    finish,
    install,
    recorded,
    sized,
    turns,
    until_answers,
)
from machinery.clock import SystemClock
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource
from schemas.meta import ObjectMeta
from store import codec
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from store.etcd.member.embedded import command
from store.informer import Informer
from store.port import KeyValue, Put
from tests.support.ports import free_port

ROUNDS: Final = sized(2, smoke=1)
UNARY_S: Final = sized(0.5, smoke=0.05)
CONCURRENCIES: Final = (1, 16, 64)
OBJECTS: Final = sized((5_000, 50_000), smoke=(50, 500))
LATENCIES: Final = sized(200, smoke=20)
WATCHERS, EVENTS = sized((20, 1_000), smoke=(3, 50))
LEASES: Final = sized(1_000, smoke=20)
_LEASE_S, _LIMIT_S = 30, 100.0
_VALUE, _KEYS = b"v" * 256, 100
OURS: Final = ("grpc", "http")
# Which version is compared is part of the result; what a peer is built on has our versions.
PEERS: Final = {"aetcd": "aetcd==1.0.0", "etcd3-py": ""}
"""Peers with the requirement to install; etcd3-py is a dependency of ours."""
Figures = dict[str, float]
Notify = Callable[[], None]


class Ours:
    """Our transport and informer."""

    def __init__(self, address: EtcdAddress) -> None:
        self._transport = connect(address)
        self.keep_alive, self.grant = self._transport.keep_alive, self._transport.grant

    async def put(self, key: str, value: bytes) -> None:
        await self._transport.commit([], [Put(key=key, value=value)])

    async def get(self, key: str) -> bytes:
        item = await self._transport.get(key)
        assert item is not None
        return item.value

    async def list(self, prefix: str) -> int:
        """List and decode as our processes do when they start; return the number of objects."""
        informer = Informer(
            self._transport,
            prefix,
            lambda item: codec.decode_object(ModelDeployment, item),
            SystemClock(),
        )
        await informer.list_once()
        return len(informer.items)

    async def watch(self, prefix: str, opened: Notify, changed: Notify) -> None:
        revision = (await self._transport.status()).revision
        async with aclosing(self._transport.watch(prefix, after_revision=revision)) as batches:
            await anext(batches)
            opened()
            async for batch in batches:
                for _ in batch.changes:
                    changed()


def _decoded(values: Sequence[bytes]) -> int:
    """Decode with our decoder: lists compare clients, not decoders."""
    items = [KeyValue(key="", value=value, create_revision=1, mod_revision=1) for value in values]
    return len([codec.decode_object(ModelDeployment, item) for item in items])


class Aetcd:
    """aetcd's Client on grpc.aio; it lists in one request, for it knows no pages."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def put(self, key: str, value: bytes) -> None:
        await self._client.put(key.encode(), value)

    async def get(self, key: str) -> bytes:
        return bytes((await self._client.get(key.encode())).value)

    async def list(self, prefix: str) -> int:
        first = prefix.encode()
        answer = await self._client.get_range(first, first[:-1] + bytes([first[-1] + 1]))
        return _decoded([item.value for item in answer])

    async def watch(self, prefix: str, opened: Notify, changed: Notify) -> None:
        watch = await self._client.watch_prefix(prefix.encode())
        opened()
        async for _ in watch:
            changed()

    async def grant(self, ttl_s: int) -> int:
        return int((await self._client.lease(ttl_s)).id)

    async def keep_alive(self, lease: int) -> int:
        return int((await self._client.refresh_lease(lease)).TTL)


class Etcd3Py:
    """etcd3-py's AioClient as published: it loses events, reads 5,000 keys in 10 s, and cannot renew a lease."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def put(self, key: str, value: bytes) -> None:
        await self._client.put(key, value)

    async def get(self, key: str) -> bytes:
        return bytes((await self._client.range(key)).kvs[0].value)


async def client_of(name: str, address: str) -> Any:
    """Connect the client of this name."""
    if name in OURS:
        return Ours(
            EtcdAddress(endpoints=(address,), transport="http" if name == "http" else "grpc")
        )
    host, _, port = address.removeprefix("http://").partition(":")
    if name == "etcd3-py":
        return Etcd3Py(importlib.import_module("etcd3.aio_client").AioClient(host, int(port)))
    options = {"grpc.max_receive_message_length": -1}
    client = importlib.import_module("aetcd").Client(host=host, port=int(port), options=options)
    await client.connect()
    return Aetcd(client)


async def repeated(
    act: Callable[[int], Awaitable[object]], at_once: int, seconds: float = UNARY_S
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
    began_s, cpu_s = time.perf_counter(), time.process_time()
    count = sum(await asyncio.gather(*(until(began_s + seconds) for _ in range(at_once))))
    passed_s = time.perf_counter() - began_s
    return {"per_s": count / passed_s, "cpu_us": (time.process_time() - cpu_s) / count * 1e6}


@asynccontextmanager
async def watching(client: Any, prefix: str, changed: Notify, count: int) -> AsyncIterator[None]:
    """Open so many watches."""
    opened = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(client.watch(prefix, event.set, changed)) for event in opened]
    try:
        async with asyncio.timeout(10):
            await asyncio.gather(*(event.wait() for event in opened))
        await asyncio.sleep(0.1)  # aetcd reports a watch before etcd confirms it
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def latency(client: Any, prefix: str) -> Figures:
    """From a put to the watcher's call, one after the other."""
    times_ms, arrived = [], asyncio.Event()
    async with watching(client, prefix, arrived.set, 1):
        for number in range(LATENCIES + 10):
            arrived.clear()
            began_s = time.perf_counter()
            async with asyncio.timeout(5):
                await asyncio.gather(client.put(f"{prefix}{number % 10}", _VALUE), arrived.wait())
            times_ms.append((time.perf_counter() - began_s) * 1e3)
    cuts = statistics.quantiles(times_ms[10:], n=100, method="inclusive")
    return {"p50_ms": cuts[49], "p99_ms": cuts[98]}


async def fanout(client: Any, prefix: str) -> Figures:
    """Put, 16 at once, until every watcher has got every event."""
    everything, delivered, numbers = asyncio.Event(), 0, iter(range(EVENTS))

    def changed() -> None:
        nonlocal delivered
        delivered += 1
        if delivered == WATCHERS * EVENTS:
            everything.set()

    async def put_some() -> None:
        for number in numbers:
            await client.put(f"{prefix}{number:04}", _VALUE)

    async with watching(client, prefix, changed, WATCHERS):
        began_s, cpu_s = time.perf_counter(), time.process_time()
        with suppress(TimeoutError):
            async with asyncio.timeout(20):
                await asyncio.gather(*(put_some() for _ in range(16)))
                await everything.wait()
    passed_s = time.perf_counter() - began_s
    return {
        "per_s": delivered / passed_s,
        "cpu_us": (time.process_time() - cpu_s) / max(1, delivered) * 1e6,
        "lost": WATCHERS * EVENTS - delivered,
    }


async def listed(client: Any, count: int) -> Figures:
    began_s, cpu_s = time.perf_counter(), time.process_time()
    read = await client.list(f"/bench/list-{count}/")
    assert read == count, f"{read} objects of {count}"
    passed_s = time.perf_counter() - began_s
    return {"per_s": count / passed_s, "cpu_us": (time.process_time() - cpu_s) / count * 1e6}


async def work(name: str, address: str) -> dict[str, Figures]:
    """Do every case with one client."""
    client, prefix = await client_of(name, address), f"/bench/{name}/"

    async def put(number: int) -> None:
        await client.put(f"{prefix}{number % _KEYS:03}", _VALUE)

    async def get(number: int) -> None:
        assert await client.get(f"{prefix}{number % _KEYS:03}") == _VALUE

    figures: dict[str, Figures] = {}
    for verb, act in (("put", put), ("get", get)):
        for number in range(_KEYS):
            await put(number)
        for at_once in CONCURRENCIES:
            figures[f"{verb}_c{at_once}"] = await repeated(act, at_once)
    if name == "etcd3-py":
        return figures
    figures["latency"] = await latency(client, f"{prefix}latency/")
    figures["fanout"] = await fanout(client, f"{prefix}fanout/")
    for count in OBJECTS:
        figures[f"list_{count}"] = await listed(client, count)
    leases = [await client.grant(_LEASE_S) for _ in range(LEASES)]

    async def renew(number: int) -> None:
        assert await client.keep_alive(leases[number % LEASES]) > 0, "the lease was lost"

    figures["renew_c16"] = await repeated(renew, 16)
    return figures


def document(number: int) -> bytes:
    """Return a ModelDeployment as the store holds it."""
    name = f"model-{number:06}"
    metadata = ObjectMeta(
        name=name,
        labels={"team": f"team-{number % 17}", "tier": "gold"},
        annotations={"note": "what this model is for, in a sentence of a user"},
        uid=f"{number:032x}",
        generation=3,
        creation_timestamp=datetime(2026, 1, 1, tzinfo=UTC),
    )
    spec = ModelDeploymentSpec(
        model=ModelSource(path=f"mlx-community/Model-{number}-4bit"),
        served_names=(f"{name}-chat", f"{name}-code"),
        replicas=3,
        context_length=32_768,
    )
    return codec.encode_spec(ModelDeployment(metadata=metadata, spec=spec))


async def fill(address: EtcdAddress) -> None:
    """Write the objects that are listed."""
    transport = connect(address)
    for count in OBJECTS:
        puts = [
            Put(key=f"/bench/list-{count}/model-{number:06}", value=document(number))
            for number in range(count)
        ]
        for start in range(0, count, 100):
            await transport.commit([], puts[start : start + 100])
    await transport.close()


@asynccontextmanager
async def running_etcd(folder: Path) -> AsyncIterator[EtcdAddress]:
    """Run the embedded member on a loopback port, which every client can reach."""
    port, log = free_port(), folder / "etcd.log"
    address = f"http://127.0.0.1:{port}"
    # Of a flag that is given twice the last one counts.
    urls = (f"--listen-client-urls={address}", f"--advertise-client-urls={address}")
    flags = (*command(locate(None), folder / "member", "bench"), *urls)
    hosts = "--host-whitelist=localhost,127.0.0.1"
    async with child(*flags, hosts, log=log, cwd=folder) as process:
        await until_answers(port, "/health", process, log)
        yield EtcdAddress(endpoints=(address,))


async def run_client(name: str, address: str, folders: dict[str, Path]) -> dict[str, Figures]:
    """Run one client's process.

    Raises:
        PeerError: it failed; with its last line.

    """
    paths = (str(ROOT), *(str(folder) for folder in folders.values()))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.store", *sys.argv[1:], "client", name, address),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), _LIMIT_S)
    except TimeoutError:
        process.kill()
        raise PeerError(f"not done within {_LIMIT_S:.0f} s") from None
    if process.returncode:
        raise PeerError((errors.decode().strip().splitlines() or ["no output"])[-1])
    return dict(json.loads(output.splitlines()[-1]))


async def measure(folder: Path, failed: dict[str, str]) -> dict[str, dict[str, Figures]]:
    """Return the median figures by client and case."""
    folders: dict[str, Path] = {}
    for peer, requirement in PEERS.items():
        with recorded(failed, peer):
            if requirement:
                pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
                folders[peer] = install(peer, *pip, "--target", "{folder}", requirement)
    rounds: dict[str, list[dict[str, Figures]]] = {}
    async with running_etcd(folder) as address:
        await fill(address)
        names = [*OURS, *(peer for peer in PEERS if peer not in failed)]
        for _, name in turns(ROUNDS, names):
            if name in failed:
                continue
            began_s = time.monotonic()
            with recorded(failed, name):
                figures = await run_client(name, address.endpoints[0], folders)
                rounds.setdefault(name, []).append(figures)
            print(f"{name}: {time.monotonic() - began_s:.0f} s", flush=True)
    return {
        name: {
            case: {
                figure: round(statistics.median(each[case][figure] for each in parts), 2)
                for figure in parts[0][case]
            }
            for case in parts[0]
        }
        for name, parts in rounds.items()
    }


def ratios(figures: dict[str, dict[str, Figures]]) -> dict[str, float]:
    """Compare ours with the best peer in each figure."""
    found: dict[str, float] = {}
    for name in OURS:
        suffix = "_http" if name == "http" else ""
        for case, mine in figures.get(name, {}).items():
            for figure, value in mine.items():
                peers = [
                    figures[peer][case][figure] for peer in PEERS if case in figures.get(peer, {})
                ]
                if not peers or figure == "lost":
                    continue
                if figure == "per_s":
                    found[f"{case}{suffix}_vs_fastest"] = round(value / max(peers), 2)
                elif figure == "cpu_us":
                    found[f"{case}{suffix}_cpu_vs_least"] = round(value / min(peers), 2)
                else:
                    fastest = f"{case}_{figure.removesuffix('_ms')}{suffix}_vs_fastest"
                    found[fastest] = round(min(peers) / value, 2)
    return found


def main() -> None:
    """Measure and print."""
    if "client" in sys.argv:
        name, address = arguments()[-2:]
        # All on the loop of our own processes: no peer costs more on it than on asyncio's (measured).
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(json.dumps(runner.run(work(name, address))))
        return
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        figures = asyncio.run(measure(Path(folder), failed))
    rows = [
        [case, figure, *(figures[name].get(case, {}).get(figure) for name in figures)]
        for case, mine in figures[OURS[0]].items()
        for figure in mine
    ]
    print(tabulate(rows, headers=["case", "figure", *figures]))
    finish("store", ratios(figures), {"clients": figures}, failed=failed)
    if ours := [name for name in OURS if name in failed]:
        sys.exit(f"bench store: {', '.join(ours)} failed")


if __name__ == "__main__":
    main()
