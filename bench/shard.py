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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.result import finish, recorded, sized
from bench.shard_parts import (
    Settings,
    Side,
    Turn,
    awake,
    start_ours,
    start_theirs,
    turn,
    until_serving,
)
from engine.linux import blas

_BUDGET_S = 220.0
_SIZES = sized((1, 2, 3), smoke=(1, 2))
_ROUNDS = sized(3, smoke=1)
_TOKENS = sized(24, smoke=6)
_WORDS = "time year people way day man thing woman life child world school state family"
_THREADS = os.cpu_count() or 1
"""Of BLAS on each side, shared by its ranks, at least one each. More than there are cores would spin for each other."""
_PEER_S = sized(20.0, smoke=3.0)
_MODEL = ("--arch=qwen2", "--hidden=384", "--heads=12", "--kv-heads=6", "--layers=6", "--endless")

Json = dict[str, Any]


@contextmanager
def serving(settings: Settings, size: int) -> Iterator[tuple[Side, Side]]:
    """Start both sides; they stand still when this begins.

    Raises:
        PeerError: mlx_lm.server does not serve with so many ranks.

    """
    sides = (start_ours(settings, size), start_theirs(settings, size))
    try:
        for side in sides:
            with side.blamed():
                until_serving(side)
            side.signal(signal.SIGSTOP)
        yield sides
    finally:
        for side in sides:
            side.end()


def compare(settings: Settings, size: int, rng: random.Random, until: float) -> tuple[Json, Json]:
    """Return the ratios and the figures of groups of this size.

    Raises:
        PeerError: mlx_lm.server does not serve with so many ranks, or fails meanwhile.

    """
    found: dict[str, dict[str, list[Turn]]] = {}
    with serving(settings, size) as sides:
        for number in range(_ROUNDS + 1):
            for count in (1, 4):
                prompts = [" ".join(rng.choices(_WORDS.split(), k=30)) for _ in range(count)]
                for side in sides if number % 2 else sides[::-1]:
                    with side.blamed(), awake(side):
                        came = turn(side, prompts, _TOKENS)
                    if number:  # the first compiles and allocates
                        found.setdefault(f"c{count}", {}).setdefault(side.name, []).append(came)
            if number and time.perf_counter() > until:
                break
    ratios, figures = {}, {}
    for name, by_side in found.items():
        for what in ("tokens_per_s", "tokens_per_cpu_s", "ttft_s"):
            mine, other = (
                statistics.median(getattr(one, what) for one in by_side[side.name])
                for side in sides
            )
            key = f"ranks{size}_{name}_{what}"
            ratios[key] = round(mine / other, 2)
            figures[key] = [round(mine, 3), round(other, 3)]
            print(f"{key:32} {ratios[key]:6} {figures[key]}", flush=True)
    return ratios, figures


def _work(side: Side) -> None:
    with suppress(OSError, RuntimeError, ValueError):  # it breaks off: that is the point
        turn(side, ["go on"], 2000)


def lose_ours(settings: Settings) -> Json:
    """Kill a rank of ours; return when that was noticed, and when the next epoch served."""
    side = start_ours(settings, 2)
    again: Side | None = None
    try:
        until_serving(side)
        working = threading.Thread(target=_work, args=(side,))
        working.start()
        time.sleep(1.0)
        began = time.perf_counter()
        os.kill(side.started[1].pid, signal.SIGKILL)
        side.started[0].wait(30)
        noticed = time.perf_counter() - began
        again = start_ours(settings, 2, epoch=2)
        until_serving(again)
        served = time.perf_counter() - began
        working.join()
        return {"noticed_s": round(noticed, 2), "serving_again_s": round(served, 2)}
    finally:
        side.end()
        if again is not None:
            again.end()


def lose_theirs(settings: Settings) -> Json:
    """Kill a rank of theirs; return when it served again, None for never.

    Raises:
        PeerError: it did not serve in the first place.

    """
    side = start_theirs(settings, 2)
    try:
        with side.blamed():
            until_serving(side)
        working = threading.Thread(target=_work, args=(side,), daemon=True)
        working.start()
        time.sleep(1.0)
        ranks = [
            process
            for process in side.processes()
            if "mlx_lm" in process.cmdline() and not process.children()
        ]
        # The younger of the two that were started one after the other.
        max(ranks, key=lambda rank: (rank.create_time(), rank.pid)).kill()
        try:
            return {"serving_again_s": round(until_serving(side, _PEER_S), 2)}
        except (TimeoutError, RuntimeError):
            return {"serving_again_s": None, "given_s": _PEER_S}
    finally:
        side.end()


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
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        make = [sys.executable, "-m", "tests.support.tiny_model", str(model), *_MODEL]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        library = blas.locate(Path(root) / "blas") if sys.platform == "linux" else None
        settings = Settings(model=model, folder=Path(root), threads=_THREADS, library=library)
        ratios: Json = {}
        figures: Json = {}
        failed: dict[str, str] = {}
        rng = random.Random(7)
        for at, size in enumerate(_SIZES, 1):
            until = began + 0.2 * at * _BUDGET_S
            with recorded(failed, f"mlx_lm.server with {size} ranks"):
                more, seen = compare(settings, size, rng, until)
                ratios |= more
                figures |= seen
        loss = {"ours": lose_ours(settings)}
        with recorded(failed, "mlx_lm.server that loses a rank"):
            loss["mlx_lm"] = lose_theirs(settings)
        print(f"loss of a rank: {loss}", flush=True)
        sums = {f"ranks{size}": sweep(size) for size in _SIZES if size > 1}
    took = {"seconds": round(time.perf_counter() - began)}
    finish(
        "shard", ratios, {"loss": loss, "figures": figures, "all_sum": sums} | took, failed=failed
    )


if __name__ == "__main__":
    main()
