"""A long prompt after a restart: with cached prompts on disk, cold, and with mlx-lm's own file: `make bench-prefix-cache`.

A round asks a new engine for a prompt (cold), lets it generate while it writes behind, kills it with -9, and asks its
successor for the same prompt (warm). An engine without a disk generates for comparison. The peer computes one prompt with
mlx-lm and saves its cache (`save_prompt_cache`); in each round another process loads it and makes a token. Loading the
model is counted on neither side. All figures are medians of seconds.

The prompt has 1,500 tokens instead of the 26,000 of a coding agent, which the CPU backend needs minutes for; what a
file spares grows with the prompt, so a longer one is no worse. Tiny models of families whose caches cannot be cut read
one of 16k tokens in this process (`prefix_cache_states.py`).
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench import prefix_cache_states
from bench.harness import SMOKE, finish, of_peer, recorded, sized
from bench.servers import Server, real_model, serving, start_ours
from schemas.kv_cache import KvCache

ROUNDS: Final = sized(2, smoke=1)
PROMPT_TOKENS: Final = sized(1_500, smoke=256)
ANSWER_TOKENS: Final = sized(64, smoke=8)
_FAMILIES: Final = ("qwen3_next", "gemma3_text")
"""One with recurrent states and one with sliding windows."""
_BLOCK: Final = 64
_PEER: Final = """
import json, sys, time
import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
model, _ = load(sys.argv[1])
prompt, path, way = json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
model(mx.array([[1, 2, 3]]))  # compiled before the clock runs
began = time.perf_counter()
if way == "cold":
    cache = make_prompt_cache(model)
    for at in range(0, len(prompt) - 1, 512):
        model(mx.array([prompt[at : min(at + 512, len(prompt) - 1)]]), cache=cache)
        mx.eval([layer.state for layer in cache])
else:
    cache = load_prompt_cache(path)
mx.eval(mx.argmax(model(mx.array([prompt[-1:]]), cache=cache)[0, -1]))
took = time.perf_counter() - began
if way == "cold":
    for layer in cache:
        layer.trim(1)
    save_prompt_cache(path, cache)
print(took)
"""


def complete(engine: Server, prompt: Sequence[int], tokens: int) -> float:
    """Return the seconds of a whole answer."""
    fields = {"model": "bench", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    began = time.perf_counter()
    status, answer = engine.call("POST", "/v1/completions", fields | {"ignore_eos": True})
    if status != 200:
        raise RuntimeError(f"the engine answered {status}: {answer[:300]!r}")
    return time.perf_counter() - began


@contextmanager
def running(model: Path, disk: Path | None) -> Iterator[Server]:
    fields: dict[str, Any] = {"context_length": 4096, "concurrency": 2}
    if disk is not None:
        fields |= {"kv_cache": KvCache(disk_bytes="4Gi"), "prefix_disk_dir": disk}
    with serving(start_ours(model, fields)) as (engine,):  # killed at its end
        complete(engine, [1, 2, 3], 1)  # compiled before the clock runs
        yield engine


def until_written(engine: Server, tokens: int) -> None:
    """Wait until the whole blocks of so many tokens are on the disk, or dropped because it was too slow."""
    ends = [f"prefix_cache_disk_{end}_blocks_total" for end in ("written", "dropped")]
    engine.until(lambda: sum(map(engine.metric, ends)) >= tokens // _BLOCK)


def measure_round(model: Path, root: Path, number: int) -> dict[str, float]:
    def prompt_of(number: int) -> list[int]:
        dice = random.Random(number)
        first, last = (
            (0, 300) if SMOKE else (1_000, 40_000)
        )  # the smoke model's vocabulary is small
        return [dice.randrange(first, last) for _ in range(PROMPT_TOKENS)]

    def peer_s(way: str) -> float:
        words = [str(model), json.dumps(prompt_of(0)), str(file), way]
        done = subprocess.run(
            [sys.executable, "-c", _PEER, *words],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        return float(done.stdout.splitlines()[-1])

    prompt, disk, file = prompt_of(number), root / f"disk-{number}", root / "peer.safetensors"
    figures: dict[str, float] = {}
    with running(model, disk) as engine:
        figures["cold_s"] = complete(engine, prompt, 1)
        figures["writing_s"] = complete(engine, prompt[:8], ANSWER_TOKENS)
        until_written(engine, PROMPT_TOKENS)
    with running(model, disk) as engine:
        figures["warm_s"] = complete(engine, prompt, 1)
    with running(model, None) as engine:
        figures["no_disk_s"] = complete(engine, prompt[:8], ANSWER_TOKENS)
    with of_peer():
        if not file.exists():  # MLX takes a minute and a half for it on a CPU
            peer_s("cold")
        figures["peer_warm_s"] = peer_s("warm")
    return figures


def main() -> None:
    """Measure and print."""
    failed: dict[str, str] = {}
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as root, recorded(failed, "mlx-lm"):
        model = real_model(Path(root))
        for number in range(ROUNDS):
            rounds.append(measure_round(model, Path(root), number))
            print({name: round(value, 3) for name, value in rounds[-1].items()}, flush=True)
    compared: dict[str, float] = {}
    figures: dict[str, float] = {}
    if rounds:
        figures = {
            name: round(statistics.median(each[name] for each in rounds), 4) for name in rounds[0]
        }
        for name, first, second in (
            ("warm_of_cold", "warm_s", "cold_s"),
            ("warm_of_peer_warm", "warm_s", "peer_warm_s"),
            ("decode_while_writing_of_no_disk", "no_disk_s", "writing_s"),
        ):
            compared[name] = round(figures[first] / figures[second], 4)
    for family in _FAMILIES:
        measured = prefix_cache_states.measure(family)
        compared[f"{family}_warm_of_cold"] = measured.pop(f"{family}_warm_of_cold")
        figures |= measured
        print(measured, flush=True)
    more = {"rounds": ROUNDS, "prompt_tokens": PROMPT_TOKENS, **figures}
    finish("prefix-cache", compared, more, failed=failed)


if __name__ == "__main__":
    main()
