"""1,000 ModelDeployments (replicas: 0): seconds to apply them, and to apply them again unchanged.

Beside it, in the same run on the same etcd: the same 1,000 documents as plain puts, one after the
other and sixteen at once: what a client without transactions would need at least.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.result import finish, sized
from machinery.clock import SystemClock
from manifests.apply import apply
from manifests.load import load_objects
from store import codec, keys
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Delete, Put, Transport

COUNT = sized(1000, smoke=50)
ROUNDS = sized(3, smoke=1)


def manifests() -> str:
    return "---\n".join(
        "apiVersion: fleet/v1alpha1\n"
        "kind: ModelDeployment\n"
        f"metadata: {{name: model-{number:04}, labels: {{team: a}}}}\n"
        "spec: {model: {path: some/model}, replicas: 0, contextLength: 4096}\n"
        for number in range(COUNT)
    )


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def clear(transport: Transport) -> None:
    found = (await transport.list(f"{keys.ROOT}/")).items
    for start in range(0, len(found), 100):
        await transport.commit([], [Delete(key=item.key) for item in found[start : start + 100]])


async def puts(transport: Transport, operations: list[Put], at_once: int) -> None:
    places = asyncio.Semaphore(at_once)

    async def one(operation: Put) -> None:
        async with places:
            await transport.commit([], [operation])

    async with asyncio.TaskGroup() as group:
        for operation in operations:
            group.create_task(one(operation))


async def command(path: Path, etcd: str) -> float:
    """Return the seconds of the whole command, interpreter and all."""
    argv = (sys.executable, "-m", "fleetctl", "apply", "-f", str(path), "--etcd", etcd)

    async def run() -> None:
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL)
        assert await process.wait() == 0

    return await timed(run)


async def measure(root: Path) -> dict[str, float]:
    clock = SystemClock()
    etcd = EmbeddedEtcd(locate(None), root / "etcd", clock)
    await etcd.start()
    transport = connect(etcd.address)
    path = root / "models.yaml"
    path.write_text(manifests())
    rows: dict[str, list[float]] = {}
    try:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            loaded = load_objects([str(path)])
            rows.setdefault("load_s", []).append(time.perf_counter() - began)
            operations = [codec.put_spec(item.obj) for item in loaded]
            for name, at_once in (("puts_one_by_one_s", 1), ("puts_16_at_once_s", 16)):
                await clear(transport)
                took = await timed(lambda n=at_once: puts(transport, operations, n))  # type: ignore[misc]
                rows.setdefault(name, []).append(took)
            await clear(transport)
            first = await timed(lambda: apply(transport, loaded, clock))
            rows.setdefault("apply_s", []).append(first)
            before = (await transport.status()).revision
            rows.setdefault("apply_again_s", []).append(
                await timed(lambda: apply(transport, loaded, clock))
            )
            writes = (await transport.status()).revision - before
            rows.setdefault("writes_of_apply_again", []).append(writes)
            await clear(transport)
            rows.setdefault("command_s", []).append(await command(path, str(etcd.address)))
            rows.setdefault("command_again_s", []).append(await command(path, str(etcd.address)))
    finally:
        await transport.close()
        await etcd.supervisor.stop()
    return {name: round(statistics.median(values), 3) for name, values in rows.items()}


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as root:
        found = asyncio.run(measure(Path(root)))
    for name, value in found.items():
        print(f"{name:24} {value}")
    ratios = {
        "puts_one_by_one_over_apply": round(found["puts_one_by_one_s"] / found["apply_s"], 1),
        "puts_16_at_once_over_apply": round(found["puts_16_at_once_s"] / found["apply_s"], 1),
    }
    finish("apply", ratios, {"objects": COUNT, **found})


if __name__ == "__main__":
    main()
