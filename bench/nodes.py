"""Throughput against the number of Macs: `make bench-nodes`. The multiples are printed, not claimed.

Simulated Macs (1 to 10) decode at a fixed pace without using a core, so the multiples say what the gateway and its choices
cost; five unlike ones decode in proportion to the memory bandwidth of their chips. All are behind one real gateway, and
each Mac has as many clients as it works on requests at once.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import orjson

from bench.harness import finish, sized
from machinery.clock import SystemClock
from schemas.chips import find_chip
from store.memory import MemoryTransport
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_world import World, deployment, endpoint, running_gateway

SIMULATED = sized((1, 2, 3, 4, 6, 8, 10), smoke=(1, 2))
SECONDS = sized(10.0, smoke=2.0)
CLIENTS, TOKENS = 4, 32
"""Clients of each Mac, and tokens of each answer."""
STEP_S = 0.05
"""Time of one step of a simulated Mac, in which each of its requests gets a token."""
UNLIKE = ("Apple M4", "Apple M4 Pro", "Apple M3 Max", "Apple M4 Max", "Apple M3 Ultra")
UNLIKE_STEP_S = 0.1
"""The same of the first of the unlike Macs, which is the slowest."""
_PATH = "/v1/chat/completions"
_TOKEN = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
_END = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'


class SimulatedMac:
    """Answers with a token a step; requests beyond those that it works on at once wait."""

    def __init__(self, step_s: float = STEP_S) -> None:
        self._step_s = step_s
        self._slots = asyncio.Semaphore(CLIENTS)

    async def answer(self, call: Call) -> None:
        """Answer one request."""
        with contextlib.suppress(ConnectionError):
            async with self._slots:
                await call.begin_stream()
                for _ in range(TOKENS):
                    await asyncio.sleep(self._step_s)
                    await call.chunk(_TOKEN)
                await call.chunk(_END)
                await call.send(b"0\r\n\r\n")


@asynccontextmanager
async def _gateway(ports: list[int]) -> AsyncIterator[str]:
    """Run a gateway in front of engines; yield its address."""
    world = World(MemoryTransport(SystemClock()))
    await world.put(deployment("tiny", replicas=len(ports)))
    for at, port in enumerate(ports):
        where = endpoint(f"tiny-{at}", "tiny", f"http://127.0.0.1:{port}", node=f"mac-{at}")
        await world.put(where)
    async with running_gateway(world.transport) as gateway:
        await gateway.knows("tiny", ready=len(ports))
        yield gateway.url


async def _tokens_per_s(url: str, clients: int) -> float:
    """Return the tokens per second of so many clients that ask again and again."""
    body = orjson.dumps(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": TOKENS,
            "stream": True,
        }
    )
    tokens, began_s = 0, time.perf_counter()
    until_s = began_s + SECONDS

    async def ask(http: aiohttp.ClientSession) -> None:
        nonlocal tokens
        while time.perf_counter() < until_s:
            async with http.post(url + _PATH, data=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    tokens += line.startswith(b"data: {") and time.perf_counter() < until_s

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(ask(http))
    return tokens / SECONDS


async def _simulated(macs_of: Sequence[SimulatedMac]) -> float:
    async with contextlib.AsyncExitStack() as started:
        macs = [FakeEngine(f"tiny-{at}", mac.answer) for at, mac in enumerate(macs_of)]
        ports = [(await started.enter_async_context(running(mac))).port for mac in macs]
        url = await started.enter_async_context(_gateway(ports))
        return await _tokens_per_s(url, CLIENTS * len(macs))


def _show(kind: str, found: dict[int, float]) -> dict[str, float]:
    """Print a table; return the multiples of one Mac by the number of Macs."""
    one = found[min(found)]
    print(f"\n{kind:24}{'tokens/s':>10}{'multiple':>10}")
    for count, rate in found.items():
        print(f"{count:<24}{rate:10.0f}{rate / one:10.2f}")
    return {str(count): round(rate / one, 2) for count, rate in found.items()}


def _unlike() -> dict[str, float]:
    """Return the multiples that five unlike Macs reach of the fastest and of the slowest alone."""
    chips = [find_chip(name, gpu_cores=None, memory_bytes=None) for name in UNLIKE]
    speeds = [chip.bandwidth_gbps for chip in chips if chip is not None]
    steps = [UNLIKE_STEP_S * speeds[0] / speed for speed in speeds]

    def rate(*step_s: float) -> float:
        return asyncio.run(_simulated([SimulatedMac(step) for step in step_s]))

    together, slowest, fastest = rate(*steps), rate(max(steps)), rate(min(steps))
    print(f"\nfive unlike simulated Macs: {together:.0f} tokens/s, {together / fastest:.2f} x the")
    print(
        f"fastest alone ({sum(speeds) / max(speeds):.2f} at best), {together / slowest:.2f} x the slowest"
    )
    return {
        "of_the_fastest": round(together / fastest, 2),
        "at_best": round(sum(speeds) / max(speeds), 2),
        "of_the_slowest": round(together / slowest, 2),
    }


def main() -> None:
    """Run the bench."""
    simulated = {
        count: asyncio.run(_simulated([SimulatedMac() for _ in range(count)]))
        for count in SIMULATED
    }
    unlike = _unlike()
    multiples = {
        "simulated_multiples": _show("simulated Macs", simulated),
        "unlike_simulated_multiples": unlike,
    }
    finish("nodes", multiples, {"tokens_per_s_of_a_simulated_mac": CLIENTS / STEP_S})


if __name__ == "__main__":
    main()
