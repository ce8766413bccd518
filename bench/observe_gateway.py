"""Cost of a recorder for a gateway: requests a second and processor time of a request, with a recorder and without.

One gateway with all that it does, and one recorder that reads its feed each second. In turns the recorder runs and
stands still (SIGSTOP), so that both states meet the same moments of the machine, and a pair gives a ratio. On a busy
machine the ratios scatter by more than a recorder costs. Therefore the cost is measured alone as well: the recorder reads
what ended while it stood still, from a gateway that does nothing else, and says how many requests these were.
"""

import asyncio
import contextlib
import signal
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.gateway import ours
from bench.gateway.figures import Burst
from bench.gateway.parts import Engine, Programs, compiled, cpu_s, free_port, own_core
from bench.gateway.peers import Peer
from bench.gateway.rounds import burst
from bench.gateway.workloads import KINDS
from bench.recorder_process import metric, recorder
from bench.result import PeerError, sized
from dashboard.collector import MOST_A_SECOND

# Of the core that a gateway takes under load: as much fewer requests a second it answers.
AIM_SHARE = 0.02
PAIRS, BURST_S = sized((6, 2.0), smoke=(2, 1.0))
# After a turn the recorder reads what it missed, which is no steady state.
_SETTLE_S = 1.5
_WARM_S = 1.0
FEEDS = sized(5, smoke=1)
_READ = "fleet_dashboard_feed_requests_total"
# Fewer requests than a gateway remembers.
_FEED_BURST_S = 1.0
_READ_S = 4.0
_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Two bursts, one after the other."""

    with_recorder: Burst
    without: Burst


@dataclass(frozen=True, slots=True)
class Stand:
    """A gateway with engines and clients, and a recorder that reads it."""

    programs: Programs
    peer: Peer
    recorder: psutil.Process
    recorder_url: str


@asynccontextmanager
async def stand(folder: Path) -> AsyncIterator[Stand]:
    """Run engines, a gateway and a recorder that reads it."""
    async with AsyncExitStack() as stack:
        programs = compiled(folder)
        engines = [Engine(programs, f"bench-{n}", free_port()) for n in range(2)]
        with own_core(is_gateway=False):
            for engine in engines:
                engine.start()
                stack.callback(engine.end)
        gateway = await ours.start(stack, folder / "gateway", {"bench": engines})
        peer = Peer("ours", gateway.port, gateway.pid, key=ours.KEY)
        with own_core(is_gateway=False):
            process, url = await stack.enter_async_context(
                recorder(f"unix:{gateway.etcd.address.socket}", folder / "state")
            )
        await _reads(url)
        stack.callback(process.send_signal, signal.SIGCONT)
        yield Stand(programs, peer, process, url)


async def _reads(url: str) -> None:
    """Wait until the recorder reads the gateway. Raises PeerError."""
    async with aiohttp.ClientSession() as http:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READY_S):
                while True:
                    async with http.get(f"{url}/metrics") as response:
                        lines = (await response.text()).splitlines()
                    if {"fleet_dashboard_synced 1", "fleet_dashboard_gateways_silent 0"} <= {
                        *lines
                    }:
                        return
                    await asyncio.sleep(0.2)
    raise PeerError(f"the recorder did not read the gateway within {_READY_S:g} s")


async def measure() -> dict[str, Any]:
    """Return both states side by side, and the ratios of the pairs."""
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as name:
        async with stand(Path(name)) as it:
            await burst(it.programs, KINDS[0], it.peer, _WARM_S)
            pairs = [await _pair(it, number) for number in range(PAIRS)]
            feeds = [await _feed_us(it) for _ in range(FEEDS)]
    rates = [pair.with_recorder.rate / pair.without.rate for pair in pairs]
    costs = [pair.with_recorder.cpu_us / pair.without.cpu_us for pair in pairs]
    quartiles = statistics.quantiles(costs, n=4)
    feed_us = statistics.median(feeds)
    without_rate = statistics.median(p.without.rate for p in pairs)
    without_us = statistics.median(p.without.cpu_us for p in pairs)
    return {
        "gateway_feed_us": round(feed_us, 2),
        "gateway_feed_share": round(feed_us * min(MOST_A_SECOND, without_rate) / 1e6, 4),
        "gateway_rate_with": round(statistics.median(p.with_recorder.rate for p in pairs)),
        "gateway_rate_without": round(without_rate),
        "gateway_rate_ratio": round(statistics.median(rates), 4),
        "gateway_cpu_us_with": round(statistics.median(p.with_recorder.cpu_us for p in pairs), 2),
        "gateway_cpu_us_without": round(without_us, 2),
        "gateway_cpu_ratio": round(statistics.median(costs), 4),
        "gateway_cpu_ratio_quartiles": [round(one, 4) for one in quartiles[::2]],
        "gateway_failed": sum(p.with_recorder.failed + p.without.failed for p in pairs),
    }


async def _feed_us(it: Stand) -> float:
    """Return the gateway's processor time for a recorder's reading of one ended request. Raises PeerError."""
    pid, process = it.peer.pid, it.recorder
    process.send_signal(signal.SIGCONT)
    await asyncio.sleep(_READ_S)
    known = await metric(it.recorder_url, _READ)
    process.send_signal(signal.SIGSTOP)
    if await burst(it.programs, KINDS[0], it.peer, _FEED_BURST_S) is None:
        raise PeerError("the gateway answered no request")
    await asyncio.sleep(_SETTLE_S)
    before_s = cpu_s(pid)
    process.send_signal(signal.SIGCONT)
    await asyncio.sleep(_READ_S)
    read_s = cpu_s(pid) - before_s
    before_s = cpu_s(pid)
    await asyncio.sleep(_READ_S)
    idle_s = cpu_s(pid) - before_s
    count = await metric(it.recorder_url, _READ) - known
    if not count:
        raise PeerError("the recorder read no request")
    return max(0.0, read_s - idle_s) / count * 1e6


async def _pair(it: Stand, number: int) -> Pair:
    """Measure both states; every second pair begins with the other one. Raises PeerError."""
    found: dict[bool, Burst] = {}
    for is_reading in (True, False) if number % 2 else (False, True):
        it.recorder.send_signal(signal.SIGCONT if is_reading else signal.SIGSTOP)
        await asyncio.sleep(_SETTLE_S)
        one = await burst(it.programs, KINDS[0], it.peer, BURST_S)
        if one is None:
            raise PeerError("the gateway answered no request")
        found[is_reading] = one
    return Pair(found[True], found[False])
