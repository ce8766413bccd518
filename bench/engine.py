"""Our engine beside `mlx_lm.server` and beside MLX's raw batch compute: `python -m bench.engine`, under five minutes.

Same SmolLM2 in float32, same BLAS, same prompts, in turns, both servers up all the time. Times are wall clock and
(`cpu_`) the server's own processor seconds, which other load on this machine disturbs less. The tiny model shows what a
request costs beside the model. `cases` limits it: `python -m bench.engine plain seeded`.

The last line is one JSON object, ratios first: ours / theirs, so that tokens/s want to be large and seconds small.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.engine_parts import Burst, Json, Server, ask, body, burst, prompt, serving
from bench.engine_start import real_model, tiny_model
from bench.result import arguments, finish, recorded, sized
from engine.linux import blas

_BUDGET_S = 285.0
_PREFIX_WORDS = 430
"""With the chat template's head some 462 tokens of SmolLM2's."""


@dataclass(slots=True)
class Bench:
    """Both servers, and what was found of them."""

    both: tuple[Server, Server]
    rng: random.Random
    ratios: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    async def take(self, name: str, wishes: Sequence[tuple[str, int, Json]]) -> None:
        """Send (prompt, tokens, more fields) to both, one after the other; note tokens/s."""
        bursts = [
            await burst(server, [body(server, text, count, **more) for text, count, more in wishes])
            for server in self.both
        ]
        mine, other = bursts
        self.ratios[f"{name}_tokens_per_s"] = round(mine.tokens_per_s / other.tokens_per_s, 2)
        self.ratios[f"{name}_tokens_per_cpu_s"] = round(
            mine.tokens_per_cpu_s / other.tokens_per_cpu_s, 2
        )
        self.note(name, tokens_per_s=[burst.tokens_per_s for burst in bursts])

    def note(self, name: str, **values: list[float]) -> None:
        """Print and keep figures, ours before theirs."""
        shown = {key: [round(value, 3) for value in pair] for key, pair in values.items()}
        self.figures.setdefault(name, {}).update(shown)
        print(f"{name:12} {shown}", flush=True)


async def plain(bench: Bench) -> None:
    """Distinct prompts at concurrency 1, 4 and 16."""
    for count, tokens in sized(((1, 32), (4, 32), (16, 32)), smoke=((1, 4),)):
        texts = [prompt(bench.rng, 60) for _ in range(count)]
        await bench.take(f"c{count}", [(text, tokens, {}) for text in texts])


async def seeded(bench: Bench) -> None:
    """16 at once, each with a seed."""
    texts = [prompt(bench.rng, 30) for _ in range(16)]
    wishes = [(one, 24, {"temperature": 0.8, "seed": at}) for at, one in enumerate(texts)]
    await bench.take("seeded16", wishes)


async def prefix(bench: Bench) -> None:
    """16 that share a long beginning: first new to the server, then known to it."""
    head = prompt(bench.rng, _PREFIX_WORDS)
    for name in ("cold_prefix", "warm_prefix"):
        tails = [prompt(bench.rng, 8) for _ in range(16)]
        bursts = [
            await burst(server, [body(server, f"{head} {tail}", 2) for tail in tails])
            for server in bench.both
        ]
        mine, other = (burst.ttft_p50 for burst in bursts)
        bench.ratios[f"{name}_ttft_p50"] = round(mine / other, 3)
        bench.note(name, ttft_p50_s=[mine, other])


async def stall(bench: Bench) -> None:
    """Three streams run; then a prompt of 2,000 tokens arrives."""
    texts = [prompt(bench.rng, 20) for _ in range(3)]
    long = prompt(bench.rng, 1950)
    gaps: list[float] = []
    for server in bench.both:
        async with aiohttp.ClientSession() as session:
            streams = [
                asyncio.ensure_future(ask(session, server, body(server, text, 70)))
                for text in texts
            ]
            await asyncio.sleep(2)
            late = asyncio.ensure_future(ask(session, server, body(server, long, 2)))
            replies = await asyncio.gather(*streams)
            await late
        gaps.append(Burst(wall_s=1, cpu_s=1, replies=replies).gap_p99())
    bench.ratios["gap_p99_while_2000_arrive"] = round(gaps[0] / gaps[1], 3)
    bench.note("stall", gap_p99_s=gaps)


async def leaving(bench: Bench) -> None:
    """A client leaves a request of 1,000 tokens that is not streamed; how long the server goes on working for it."""
    found: list[float] = []
    for server in bench.both:
        request = body(server, prompt(bench.rng, 20), 1000) | {"stream": False}
        del request["stream_options"]
        url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        async with aiohttp.ClientSession() as session:
            asking = asyncio.ensure_future(session.post(url, json=request))
            await asyncio.sleep(1.5)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        found.append(await _quiet(server, 12))
    bench.ratios["busy_after_leaving_s"] = round(found[0] / found[1], 3)
    bench.note("leaving", busy_s=found)


async def _quiet(server: Server, most_s: float) -> float:
    """Return the seconds until a server stops to compute, at most `most_s`."""
    began = last = time.perf_counter()
    cpu = server.cpu_s
    while last - began < most_s:
        await asyncio.sleep(0.25)
        now, cpu_now = time.perf_counter(), server.cpu_s
        if cpu_now - cpu < 0.1 * (now - last):
            return last - began
        last, cpu = now, cpu_now
    return most_s


async def memory(bench: Bench) -> None:
    """Memory of both servers after all cases."""
    held = [server.rss_mb for server in bench.both]
    bench.ratios["rss_after"] = round(held[0] / held[1], 2)
    bench.note("memory", rss_mb=held)


async def overhead(bench: Bench) -> None:
    """On the tiny model: what a request of 16 tokens costs beside the model's own work."""
    bursts: list[Burst] = []
    for server in bench.both:
        rounds = [
            await burst(server, [body(server, prompt(bench.rng, 12), 16) for _ in range(16)])
            for _ in range(sized(5, smoke=1))
        ]
        bursts.append(
            Burst(
                wall_s=sum(one.wall_s for one in rounds),
                cpu_s=sum(one.cpu_s for one in rounds),
                replies=[reply for one in rounds for reply in one.replies],
            )
        )
    mine, other = bursts
    bench.ratios["tiny_requests_per_s"] = round(other.wall_s / mine.wall_s, 2)
    bench.ratios["tiny_cpu_per_request"] = round(mine.cpu_s / other.cpu_s, 2)
    count = len(mine.replies)
    bench.note("tiny", requests_per_s=[count / burst.wall_s for burst in bursts])
    bench.note("tiny", cpu_ms=[1e3 * burst.cpu_s / count for burst in bursts])


def raw(bench: Bench, model: Path, library: Path | None) -> None:
    """Hold decoding at 16 against the bare model: both generate 16 x 40 tokens after 64."""
    command = [sys.executable, "-m", "bench.engine_raw", str(model), str(library or ""), "16", "24"]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(command, check=True, capture_output=True, env=environment)
    bare = json.loads(done.stdout)
    bench.figures["raw16"] = {key: round(value, 4) for key, value in bare.items()}
    print(f"raw16        {bench.figures['raw16']}", flush=True)


async def decode(bench: Bench) -> None:
    """Seconds between tokens of 16 streams, for comparison with `raw`."""
    server = bench.both[0]
    found = await burst(server, [body(server, prompt(bench.rng, 16), 48) for _ in range(16)])
    gaps = sorted(
        after - before
        for reply in found.replies
        for before, after in zip(reply.times[20:], reply.times[21:], strict=False)
    )
    step = gaps[len(gaps) // 2]
    bench.figures["decode16"] = {"step_s": round(step, 4)}
    bench.ratios["decode16_of_raw"] = round(bench.figures["raw16"]["step_s"] / step, 3)
    print(f"decode16     {bench.figures['decode16']}", flush=True)


CASES: dict[str, Callable[[Bench], Awaitable[None]]] = {
    "plain": plain,
    "prefix": prefix,
    "seeded": seeded,
    "stall": stall,
    "leaving": leaving,
    "memory": memory,
}


def make_models(root: Path) -> tuple[Path, Path]:
    """Return the folders of SmolLM2 and of a tiny model with random weights."""
    (root / "real").mkdir()
    return real_model(root / "real"), tiny_model(root)


async def run(models: tuple[Path, Path], wanted: list[str]) -> Bench:
    """Run the cases that are wanted, for as long as there is time.

    Raises:
        PeerError: mlx_lm.server does not start, or does not answer.

    """
    began = time.perf_counter()
    smol, tiny = models
    library = blas.locate(smol.parent / "blas")
    async with serving(tiny, library) as both:
        bench = Bench(both, random.Random(5))
        for server in both:
            await burst(server, [body(server, "warm", 4)])
        if not wanted or "tiny" in wanted:
            await overhead(bench)
    if not wanted or "raw" in wanted:
        raw(bench, smol, library)
    async with serving(smol, library) as both:
        bench.both = both
        for server in both:
            await burst(server, [body(server, "warm", 4)])
        if not wanted or "raw" in wanted:
            await decode(bench)
        for name, case in CASES.items():
            if time.perf_counter() - began > _BUDGET_S:
                bench.figures.setdefault("left_out_for_time", []).append(name)
            elif not wanted or name in wanted:
                await case(bench)
    bench.figures["seconds"] = round(time.perf_counter() - began)
    return bench


def main() -> None:
    """Measure and print."""
    failed: dict[str, str] = {}
    ratios: dict[str, float] = {}
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root, recorded(failed, "mlx_lm.server"):
        bench = asyncio.run(
            run(
                make_models(Path(root)), [*arguments()] or sized([], smoke=["tiny", "raw", "plain"])
            )
        )
        ratios, figures = bench.ratios, bench.figures
    finish("engine", ratios, figures, failed=failed)


if __name__ == "__main__":
    main()
