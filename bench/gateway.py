"""Latency that the gateway adds to an engine: `python -m bench.gateway`, under two minutes.

A stand-in engine that answers at once is called directly, through our gateway (a real process with
a real etcd), and through nginx if that is installed, in turns, at concurrency 1 and 16, streamed
(64 events) and not. Real engines take milliseconds a token; the stand-in takes none, so that what
is seen is the gateway. Load generator, gateway, engine and etcd share this machine's cores: at
concurrency 16 the figures are queueing for the processor; read ratios, not microseconds.

The last line is one JSON object, ratios first.
"""

import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import uvloop

from bench.gateway_load import Times, burst
from machinery.clock import SystemClock
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource
from schemas.meta import ObjectMeta
from schemas.replica import Endpoint, EndpointSpec
from store import codec, keys
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Put

ROUNDS = 5
BURST_S = 0.9
CONCURRENCIES = (1, 16)
MODES = {"whole": False, "stream": True}
_READY_S = 20.0

_NGINX = """
worker_processes 1; pid {folder}/pid; error_log {folder}/error.log; daemon off;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 64; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port}; keepalive_requests 100000000;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


@dataclass
class Peer:
    """One way to the engine."""

    name: str
    port: int
    pid: int | None = None
    times: dict[tuple[str, int], Times] = field(default_factory=dict)
    cpu_s: dict[tuple[str, int], float] = field(default_factory=dict)

    def cpu_so_far_s(self) -> float:
        if self.pid is None:
            return 0.0
        processes = [psutil.Process(self.pid), *psutil.Process(self.pid).children()]
        return sum(sum(process.cpu_times()[:2]) for process in processes)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def child(*command: str, log: Path) -> AsyncIterator[int]:
    """Run a program; yield its pid."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)  # noqa: ASYNC220 - once
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(10)


async def answers(port: int, log: Path) -> None:
    """Wait until a request through the port is answered."""
    deadline_s = time.monotonic() + _READY_S
    while True:
        try:
            await burst(port, connections=1, is_streamed=False, seconds=0)
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"port {port}: {error}\n{log.read_text()[-2000:]}") from error
            await asyncio.sleep(0.05)
        else:
            return


async def publish(address: EtcdAddress, engine_port: int) -> None:
    """Declare a model and the stand-in as its only endpoint."""
    spec = ModelDeploymentSpec(model=ModelSource(path="/models/bench"))
    deployment = ModelDeployment(metadata=ObjectMeta(name="bench"), spec=spec)
    endpoint = Endpoint(
        metadata=ObjectMeta(name="bench-0"),
        spec=EndpointSpec(
            deployment="bench",
            replica_uid="bench",
            node="bench",
            url=f"http://127.0.0.1:{engine_port}",
            served_names=("bench",),
        ),
    )
    transport = connect(address)
    key = keys.endpoint_key("bench", "bench-0")
    puts = [codec.put_spec(deployment), Put(key=key, value=codec.encode(endpoint))]
    await transport.commit([], puts)
    await transport.close()


async def start(stack: AsyncExitStack, folder: Path) -> list[Peer]:
    """Start engine, etcd, gateway and, if it is there, nginx."""
    log = folder / "log"
    engine_port, gateway_port = free_port(), free_port()
    run = (sys.executable, "-m")
    await stack.enter_async_context(child(*run, "bench.gateway_engine", str(engine_port), log=log))
    etcd = EmbeddedEtcd(locate(None), folder / "etcd", SystemClock())
    await etcd.start()
    stack.push_async_callback(etcd.supervisor.stop)
    await publish(etcd.address, engine_port)
    where = ("--port", str(gateway_port), "--etcd", str(etcd.address))
    pid = await stack.enter_async_context(
        child(*run, "gateway", *where, "--log-level", "warning", log=log)
    )
    peers = [Peer("direct", engine_port), Peer("ours", gateway_port, pid)]
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is not None:
        port = free_port()
        config = folder / "nginx.conf"
        config.write_text(_NGINX.format(folder=folder, engine=engine_port, port=port))
        command = (nginx, "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log"))
        peers.append(Peer("nginx", port, await stack.enter_async_context(child(*command, log=log))))
    for peer in peers:
        await answers(peer.port, log)
    return peers


async def measure(peers: Sequence[Peer]) -> None:
    """Load all peers in turns, so that a noisy moment hits them alike."""
    for mode, is_streamed in MODES.items():
        for connections in CONCURRENCIES:
            case = (mode, connections)
            for round_ in range(ROUNDS + 1):
                for peer in peers:
                    cpu_s = peer.cpu_so_far_s()
                    times = await burst(
                        peer.port,
                        connections=connections,
                        is_streamed=is_streamed,
                        seconds=BURST_S if round_ else 0.2,
                    )
                    if round_:  # the first warms up
                        peer.times.setdefault(case, Times()).add(times)
                        spent_s = peer.cpu_so_far_s() - cpu_s
                        peer.cpu_s[case] = peer.cpu_s.get(case, 0.0) + spent_s


def percentiles_us(seconds: Sequence[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return round(cuts[49] * 1e6, 1), round(cuts[98] * 1e6, 1)


@dataclass(frozen=True)
class Row:
    """One peer in one case."""

    case: str
    peer: str
    rate: float
    p50_us: float
    p99_us: float
    cpu_us: float


def rows(peers: Sequence[Peer]) -> list[Row]:
    """Return the figures of every case; of streams also the time to the first byte."""
    found = []
    for mode, is_streamed in MODES.items():
        for connections in CONCURRENCIES:
            for what in ("first_byte", "whole") if is_streamed else ("whole",):
                name = f"{mode}_{'first_byte_' if what == 'first_byte' else ''}c{connections}"
                for peer in peers:
                    times = peer.times[mode, connections]
                    count = len(times.whole)
                    p50_us, p99_us = percentiles_us(getattr(times, what))
                    cpu_us = peer.cpu_s[mode, connections] / count * 1e6
                    rate = count / times.elapsed_s
                    found.append(Row(name, peer.name, rate, p50_us, p99_us, round(cpu_us, 1)))
    return found


def report(found: Sequence[Row]) -> dict[str, float]:
    """Print a table; return the figures, ratios first."""
    ratios: dict[str, float] = {}
    added: dict[str, float] = {}
    by_peer = {(row.case, row.peer): row for row in found}
    print(f"{'case':24}{'peer':8}{'requests/s':>11}{'p50 us':>10}{'p99 us':>10}", end="")
    print(f"{'+p50':>9}{'+p99':>9}{'cpu us':>9}")
    for row in found:
        direct = by_peer[row.case, "direct"]
        nginx = by_peer.get((row.case, "nginx"))
        p50_us, p99_us = row.p50_us - direct.p50_us, row.p99_us - direct.p99_us
        print(
            f"{row.case:24}{row.peer:8}{row.rate:11.0f}{row.p50_us:10.1f}{row.p99_us:10.1f}", end=""
        )
        print(f"{p50_us:9.1f}{p99_us:9.1f}{row.cpu_us:9.1f}")
        if row.peer == "direct":
            continue
        name = f"{row.case}_{row.peer}"
        ratios[f"{name}_p50_over_direct"] = round(row.p50_us / direct.p50_us, 2)
        ratios[f"{name}_p99_over_direct"] = round(row.p99_us / direct.p99_us, 2)
        if row.peer == "ours" and nginx is not None and nginx.cpu_us:
            ratios[f"{name}_cpu_over_nginx"] = round(row.cpu_us / nginx.cpu_us, 2)
        added[f"{name}_added_p50_us"] = round(p50_us, 1)
        added[f"{name}_added_p99_us"] = round(p99_us, 1)
        added[f"{name}_cpu_us_per_request"] = row.cpu_us
    return {**ratios, **added}


async def main() -> None:
    """Measure and print."""
    began_s = time.monotonic()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-bench-")))
        peers = await start(stack, folder)
        print(f"{os.cpu_count()} cores shared by load, gateway, engine and etcd; stand-in engine,")
        print("so this is what the gateway costs and not what a model takes. cpu us: per request.")
        if "nginx" not in [peer.name for peer in peers]:
            print("nginx is not on PATH: not compared")
        await measure(peers)
    figures = report(rows(peers))
    figures["seconds"] = round(time.monotonic() - began_s, 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
