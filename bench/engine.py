"""Our engine beside `mlx_lm.server` and beside MLX's raw batch compute: `make bench-engine`, under five minutes.

Same SmolLM2 in float32, same BLAS, same prompts, in turns, both servers up all the time. Times are wall clock and
(`cpu_`) the server's own processor seconds, which other load on this machine disturbs less. The tiny model shows what a
request costs beside the model. `cases` limits it: `python -m bench.engine plain seeded`.

Tiny models of families whose caches cannot be cut (`_FAMILIES`) hold a conversation of 30 turns: which share of its
prompts was cached, ours and theirs.

The last line is one JSON object, ratios first: ours / theirs, so that tokens/s want to be large and seconds small.
"""

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.harness import arguments, finish, recorded, sized, turns
from bench.servers import (
    Burst,
    Json,
    Server,
    family_model,
    fast_blas,
    prompt,
    real_model,
    serving,
    start_ours,
    start_theirs,
    tiny_model,
)

_BUDGET_S: Final = 250.0
_STARTS: Final = sized(3, smoke=1)
_PREFIX_WORDS: Final = 430
"""With the chat template's head some 462 tokens of SmolLM2's."""
_CROWD: Final = 64
_FAMILIES: Final = ("qwen3_next", "gemma3_text")
"""One with recurrent states and one with sliding windows."""
_TURNS: Final = sized(30, smoke=3)
_RAW: Final = """
import ctypes, json, sys, time
if sys.argv[2]:
    ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)  # MLX takes its BLAS from what is loaded already
from pathlib import Path
import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from mlx_lm.utils import load_model
model, _ = load_model(Path(sys.argv[1]))
caches = [BatchKVCache([0] * 16) for _ in make_prompt_cache(model)]
tokens = mx.argmax(model(mx.ones((16, 64), mx.int32), cache=caches)[:, -1], axis=-1)
mx.eval(tokens)
began = time.perf_counter()
for _ in range(24):
    tokens = mx.argmax(model(tokens[:, None], cache=caches)[:, -1], axis=-1)
    mx.eval(tokens)
print((time.perf_counter() - began) / 24)
"""
"""A model called in a loop: seconds of a decode step of 16 rows after prompts of 64 tokens."""


@dataclass(slots=True)
class Bench:
    """Both servers, and what was measured of them."""

    both: tuple[Server, ...]
    rng: random.Random = field(default_factory=lambda: random.Random(5))
    ratios: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def compare(self, name: str, ours: float, theirs: float) -> None:
        """Print and keep a figure of both and its ratio."""
        self.ratios[name] = round(ours / theirs, 3)
        self.figures[name] = [round(ours, 3), round(theirs, 3)]
        print(f"{name:28} {self.ratios[name]:8} {self.figures[name]}", flush=True)

    def bursts(self, texts: Sequence[str], tokens: int, *fields: Json) -> list[Burst]:
        """Send these to both, one after the other."""
        return [server.burst(texts, tokens, *fields) for server in self.both]

    def rates(self, name: str, bursts: Sequence[Burst]) -> None:
        ours, theirs = bursts
        self.compare(f"{name}_tokens_per_s", ours.tokens_per_s, theirs.tokens_per_s)
        self.compare(f"{name}_tokens_per_cpu_s", ours.tokens_per_cpu_s, theirs.tokens_per_cpu_s)


def plain(bench: Bench) -> None:
    """Distinct prompts at concurrency 1, 4 and 16; the short ones in several turns, because one is mostly noise."""
    for count, tokens, times in sized(((1, 32, 4), (4, 32, 3), (16, 32, 1)), smoke=((1, 4, 1),)):
        turns_ = [
            bench.bursts([prompt(bench.rng, 60) for _ in range(count)], tokens)
            for _ in range(times)
        ]
        bench.rates(f"c{count}", [Burst.joined(side) for side in zip(*turns_, strict=True)])


def prefix(bench: Bench) -> None:
    """16 that share a long beginning: first new to the server, then known to it."""
    head = prompt(bench.rng, _PREFIX_WORDS)
    for name in ("cold_prefix", "warm_prefix"):
        ours, theirs = bench.bursts([f"{head} {prompt(bench.rng, 8)}" for _ in range(16)], 2)
        bench.compare(f"{name}_ttft_p50", ours.ttft_s, theirs.ttft_s)


def seeded(bench: Bench) -> None:
    """16 at once, each with a seed."""
    texts = [prompt(bench.rng, 30) for _ in range(16)]
    fields = [{"temperature": 0.8, "seed": seed} for seed in range(16)]
    bench.rates("seeded16", bench.bursts(texts, 24, *fields))


def stall(bench: Bench) -> None:
    """Three streams run; then a prompt of 2,000 tokens arrives."""
    texts, long = [prompt(bench.rng, 20) for _ in range(3)], prompt(bench.rng, 1950)
    gaps = []
    for server in bench.both:
        with ThreadPoolExecutor(1) as pool:
            streams = pool.submit(server.burst, texts, 70)
            time.sleep(2)
            server.ask(long, 2)
            between = streams.result().gaps()
        gaps.append(between[min(len(between) - 1, int(0.99 * len(between)))])
    bench.compare("gap_p99_while_2000_arrive", *gaps)


def leaving(bench: Bench) -> None:
    """A client leaves a request of 1,000 tokens that is not streamed; how long the server goes on working for it."""
    busy_s = []
    for server in bench.both:
        turn = {"role": "user", "content": prompt(bench.rng, 20)}
        body = json.dumps({"model": server.model, "messages": [turn], "max_tokens": 1000}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            time.sleep(1.5)
        began = last = time.perf_counter()
        cpu = server.cpu_s()
        while last - began < 12:
            time.sleep(0.25)
            now, cpu_now = time.perf_counter(), server.cpu_s()
            if cpu_now - cpu < 0.1 * (now - last):
                break
            last, cpu = now, cpu_now
        busy_s.append(max(0.01, last - began))
    bench.compare("busy_after_leaving_s", *busy_s)


def memory(bench: Bench) -> None:
    """Memory of both servers after all cases."""
    bench.compare("rss_after_mb", *(server.rss_mb() for server in bench.both))


def overhead(bench: Bench) -> None:
    """On the tiny model: what a request of 16 tokens costs beside the model's own work."""
    rounds = [
        bench.bursts([prompt(bench.rng, 12) for _ in range(16)], 16)
        for _ in range(sized(5, smoke=1))
    ]
    wall = [sum(bursts[side].wall_s for bursts in rounds) for side in (0, 1)]
    cpu = [sum(bursts[side].cpu_s for bursts in rounds) for side in (0, 1)]
    count = 16 * len(rounds)
    bench.compare("tiny_requests_per_s", *(count / seconds for seconds in wall))
    bench.compare("tiny_cpu_ms_per_request", *(1e3 * seconds / count for seconds in cpu))
    texts, tokens = [prompt(bench.rng, 12) for _ in range(_CROWD)], sized(200, smoke=4)
    ours, theirs = bench.bursts(texts, tokens)
    each = [1e6 * burst.cpu_s / _CROWD / tokens for burst in (ours, theirs)]
    bench.compare("tiny64_cpu_us_per_token", *each)


def raw(bench: Bench, model: Path) -> None:
    """Hold the seconds between tokens of 16 streams against a step of the bare model; no server works meanwhile."""
    command = [sys.executable, "-c", _RAW, str(model), str(fast_blas(model) or "")]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": str(os.cpu_count() or 1)}
    done = subprocess.run(command, check=True, capture_output=True, env=environment)
    gaps = bench.both[0].burst([prompt(bench.rng, 16) for _ in range(16)], 48).gaps(20)
    bench.compare("decode16_of_raw", float(done.stdout), statistics.median(gaps))


def starts(bench: Bench, model: Path) -> None:
    """From the start of a process to its first token, and its processor time and memory then; warm page cache.

    `mlx_lm.server` answers 200 at /health while it still loads, so only a token is comparable.
    """
    seconds: dict[str, list[tuple[float, float, float]]] = {"ours": [], "mlx_lm": []}
    for number, begin in turns(_STARTS + 1, (start_ours, start_theirs)):
        began, server = time.perf_counter(), begin(model)
        try:
            with server.blamed():
                server.until()
            taken = (time.perf_counter() - began, server.cpu_s(), server.rss_mb())
            if number:  # the first reads what the others find in the page cache
                seconds[server.name].append(taken)
        finally:
            server.end()
    for at, name in enumerate(("start_to_token_s", "start_cpu_s", "start_rss_mb")):
        bench.compare(
            name, *(statistics.median(each[at] for each in side) for side in seconds.values())
        )


def states(bench: Bench, root: Path) -> None:
    """Compare the cached shares of a conversation whose prompts grow to 2,000 tokens."""
    for family in _FAMILIES:
        model = family_model(root, family)
        with serving(start_ours(model), start_theirs(model)) as servers:
            shares = [round(cached_share(server, random.Random(7)), 3) for server in servers]
        bench.ratios[f"{family}_cached_share"] = shares[0]
        bench.figures[f"{family}_cached_shares"] = shares
        print(family, shares, flush=True)


def cached_share(server: Server, rng: random.Random) -> float:
    """Hold a conversation; return the share of its prompts' tokens that the server says it had cached."""
    messages = [{"role": "system", "content": prompt(rng, 400)}]
    asked = cached = 0
    for _ in range(_TURNS):
        messages.append({"role": "user", "content": prompt(rng, 20)})
        fields: Json = {"model": server.model, "messages": messages, "max_tokens": 8}
        with server.blamed():
            status, raw = server.call("POST", "/v1/chat/completions", fields | {"temperature": 0})
            if status != 200:
                raise RuntimeError(f"{server.name}: {status} {raw[:200]!r}")
            reply = json.loads(raw)
            details = reply["usage"].get("prompt_tokens_details") or {}
        asked += reply["usage"]["prompt_tokens"]
        cached += details.get("cached_tokens") or 0
        message = reply["choices"][0]["message"]
        messages.append({"role": "assistant", "content": message.get("content") or ""})
    return float(cached / asked)


CASES: dict[str, Callable[[Bench], None]] = {
    case.__name__: case for case in (plain, prefix, seeded, stall, leaving, memory)
}


def run(bench: Bench, root: Path, wanted: Sequence[str]) -> None:
    """Run the cases that are wanted, for as long as there is time.

    Raises:
        PeerError: mlx_lm.server does not start, or does not answer.

    """
    began = time.perf_counter()

    def is_wanted(case: str) -> bool:
        return not wanted or case in wanted

    (root / "real").mkdir()
    smol, tiny = real_model(root / "real"), tiny_model(root)
    if is_wanted("starts"):
        starts(bench, smol)
    for model in (tiny, smol):
        fields = {"concurrency": _CROWD} if model == tiny else None
        with serving(start_ours(model, fields), start_theirs(model)) as bench.both:
            for server in bench.both:
                server.ask("warm", 4)
            if model == tiny:
                if is_wanted("overhead"):
                    overhead(bench)
                continue
            if is_wanted("raw"):
                raw(bench, smol)
            for name, case in CASES.items():
                if time.perf_counter() - began > _BUDGET_S:
                    bench.figures.setdefault("left_out_for_time", []).append(name)
                elif is_wanted(name):
                    case(bench)
    if is_wanted("states"):
        states(bench, root)


def main() -> None:
    """Measure and print."""
    failed: dict[str, str] = {}
    bench = Bench(())
    with tempfile.TemporaryDirectory() as root, recorded(failed, "mlx_lm.server"):
        cases = sized((), smoke=("starts", "overhead", "raw", "plain", "states"))
        run(bench, Path(root), tuple(arguments()) or cases)
    finish("engine", bench.ratios, {"figures": bench.figures}, failed=failed)


if __name__ == "__main__":
    main()
