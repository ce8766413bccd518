"""Groups of ranks: ours beside `mlx.launch ... mlx_lm.server`, in turns: `make bench-shard`, under five minutes.

The same random model of some 30 MB in float32 (12 heads, so that 2 and 3 ranks can share it), the same BLAS and the same
number of its threads whatever the number of ranks, over ring on this machine. One side stands still (SIGSTOP) while the
other has its turn. What is seen here is what a group costs, not what it gains: all ranks share the cores.

- `tokens_per_s`, `ttft_s`: one request, and four at once, Tensor over 1, 2 and 3 ranks; medians of the rounds.
- `loss`: kill -9 of rank 1 of 2 while an answer is made: when rank 0 has ended, and when a new epoch serves, started at once
  as agents do (their own looks come on top). mlx_lm.server is given 20 s to serve again.
- `all_sum`: the sweep of `fleetctl fabric bench --local`.

The last line is one JSON object, ratios first: ours / theirs, so that tokens/s want to be large and seconds small.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from bench.harness import PeerError, finish, recorded, sized, turns
from bench.servers import Burst, Json, Server, prompt, serving, start_ours, start_theirs, tiny_model

_BUDGET_S = 220.0
_SIZES = sized((1, 2, 3), smoke=(1, 2))
_ROUNDS = sized(3, smoke=1)
_TOKENS = sized(24, smoke=6)
_PEER_S = sized(20.0, smoke=3.0)
_MODEL = ("--arch=qwen2", "--hidden=384", "--heads=12", "--kv-heads=6", "--layers=6")
_FIGURES = ("tokens_per_s", "tokens_per_cpu_s", "ttft_s")


def compare(model: Path, size: int, rng: random.Random, until: float) -> tuple[Json, Json]:
    """Return the ratios and the figures of groups of this size.

    Raises:
        PeerError: mlx_lm.server does not serve with so many ranks, or fails meanwhile.

    """
    bursts: dict[str, dict[str, list[Burst]]] = {}
    sides = start_ours(model, {"concurrency": 4}, size=size), start_theirs(model, size=size)
    with serving(*sides):
        for side in sides:
            side.signal(signal.SIGSTOP)
        for number in range(_ROUNDS + 1):
            for count in (1, 4):
                prompts = [prompt(rng, 30) for _ in range(count)]
                for _, side in turns(1, sides if number % 2 else sides[::-1]):
                    with side.awake():
                        burst = side.burst(prompts, _TOKENS)
                    if number:  # the first compiles and allocates
                        bursts.setdefault(f"c{count}", {}).setdefault(side.name, []).append(burst)
            if number and time.perf_counter() > until:
                break
    ratios, figures = {}, {}
    for name, by_side in bursts.items():
        for what in _FIGURES:
            ours, theirs = (
                statistics.median(getattr(burst, what) for burst in by_side[side.name])
                for side in sides
            )
            key = f"ranks{size}_{name}_{what}"
            ratios[key] = round(ours / theirs, 2)
            figures[key] = [round(ours, 3), round(theirs, 3)]
            print(f"{key:32} {ratios[key]:6} {figures[key]}", flush=True)
    return ratios, figures


def work(side: Server) -> threading.Thread:
    """Start an answer in a thread."""

    def ask() -> None:
        with suppress(
            OSError, RuntimeError, ValueError, PeerError
        ):  # it breaks off: that is the point
            side.ask("go on", 2000)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    time.sleep(1.0)
    return thread


def lose_ours(model: Path) -> Json:
    """Kill a rank of ours; return when that was noticed, and when the next epoch served."""
    with serving(start_ours(model, {"concurrency": 4}, size=2)) as (side,):
        working, began = work(side), time.perf_counter()
        os.kill(side.started[1].pid, signal.SIGKILL)
        side.started[0].wait(30)
        noticed = time.perf_counter() - began
        with serving(start_ours(model, {"concurrency": 4}, size=2, epoch=2)):
            served = time.perf_counter() - began
        working.join()
    return {"noticed_s": round(noticed, 2), "serving_again_s": round(served, 2)}


def lose_theirs(model: Path) -> Json:
    """Kill a rank of theirs; return when it served again, None for never.

    Raises:
        PeerError: it did not serve in the first place.

    """
    with serving(start_theirs(model, size=2)) as (side,):
        work(side)
        ranks = [
            process
            for process in side.processes()
            if "mlx_lm" in process.cmdline() and not process.children()
        ]
        # The younger of the two that were started one after the other.
        max(ranks, key=lambda rank: (rank.create_time(), rank.pid)).kill()
        try:
            return {"serving_again_s": round(side.until(within_s=_PEER_S), 2)}
        except (TimeoutError, RuntimeError):
            return {"serving_again_s": None, "given_s": _PEER_S}


def sweep(size: int) -> Json:
    """Return what `fleetctl fabric bench` finds: for each size in bytes the median in us and GB/s."""
    command = [sys.executable, "-m", "fleetctl", "fabric", "bench", "--local", str(size)]
    done = subprocess.run([*command, "--quick", "-o", "json"], capture_output=True, check=True)
    return {
        str(load["size"]): [round(load["medianUs"]), round(load["averageGbS"], 4)]
        for load in json.loads(done.stdout)["sizes"]
    }


def main() -> None:
    """Measure and print."""
    began = time.perf_counter()
    ratios: Json = {}
    figures: Json = {}
    failed: dict[str, str] = {}
    rng = random.Random(7)
    with tempfile.TemporaryDirectory() as root:
        model = tiny_model(Path(root), *_MODEL)
        for at, size in enumerate(_SIZES, 1):
            with recorded(failed, f"mlx_lm.server with {size} ranks"):
                more, values = compare(model, size, rng, began + 0.2 * at * _BUDGET_S)
                ratios |= more
                figures |= values
        loss = {"ours": lose_ours(model)}
        with recorded(failed, "mlx_lm.server that loses a rank"):
            loss["mlx_lm"] = lose_theirs(model)
        print(f"loss of a rank: {loss}", flush=True)
        sums = {f"ranks{size}": sweep(size) for size in _SIZES if size > 1}
    finish("shard", ratios, {"loss": loss, "figures": figures, "all_sum": sums}, failed=failed)


if __name__ == "__main__":
    main()
