"""Rows of a batch in caches of their own, beside the padded batch: decoding, joins and leaves, memory, admission.

`python -m bench.rows` makes a model of random weights: the width of a model of half a billion parameters, with two of
its layers. Both batches decode in turns in this process, on MLX's backend. Their caches are filled with random numbers,
because reading 4,000 tokens on a CPU takes longer than everything else here. All times are CPU seconds, the least of
several rounds, with one thread of the BLAS: other processes on the machine change them least. A ratio above 1 is in
favour of rows.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.result import SMOKE, finish, sized
from engine.jobs import Job, SamplingParams
from engine.linux import blas
from engine.memory.budget import MemoryBudget
from engine.memory.guard import MemoryGuard
from models.footprint import KvFootprint, ServingLoad
from tests.support.mlx_models import BASE, build, module

_ROUNDS: Final = sized(4, smoke=1)
_STEPS: Final = sized(3, smoke=1)
_CONTEXTS: Final = 4
_LONGEST: Final = sized(4_000, smoke=400)
_CONFIG: Final = BASE | sized(
    {
        "num_hidden_layers": 2,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 8192,
    },
    smoke={},
)
# As many rows of each length between 50 and 4,000 as of any other on a logarithmic scale, as requests have.
MIXED: Final = [round(50 * (_LONGEST / 50) ** (at / 15)) for at in range(16)]
SCENES: Final = {
    "mixed_16": MIXED,
    "equal_16_of_512": [512] * 16,
    "short_16_of_60": [60] * 16,
    "alone_of_60": [60],
    "alone_of_1000": [1_000],
}
_GREEDY: Final = SamplingParams(temperature=0)


class Batch:
    """A decode stage whose caches hold random numbers."""

    def __init__(self, model: Any, lengths: Sequence[int], *, by_rows: bool) -> None:
        self._model, self._by_rows = model, by_rows
        self._made = 0
        self.stage = module("engine.batch.decode").DecodeStage(
            model, ends=frozenset(), by_rows=by_rows
        )
        self.join([self.fill(length) for length in lengths], lengths)
        for _ in range(1 if max(lengths) > 1_024 else 40):  # until the layout is settled
            self.stage.step()

    def fill(self, length: int) -> list[Any]:
        mx, layers = module("mlx.core"), module("engine.cache.layer_caches")
        caches: list[Any] = layers.make_caches(
            self._model, module("engine.cache.interface").KvOptions()
        )
        shape = (1, _CONFIG["num_key_value_heads"], length, _CONFIG["head_dim"])
        for cache in caches:
            cache.update_and_fetch(mx.random.normal(shape), mx.random.normal(shape))
        mx.eval([cache.state for cache in caches])
        return caches

    def join(self, caches: Sequence[list[Any]], lengths: Sequence[int]) -> None:
        """Add rows with these caches."""
        decode, rows = module("engine.batch.decode"), []
        for length in lengths:
            prompt = (5,) * (length + 1)
            job = Job(id=self._made, prompt=prompt, max_tokens=10_000, sampling=_GREEDY)
            rows.append(decode.DecodeRow.of(job, cached_tokens=0, grammars=None))
            self._made += 1
        batches = module("engine.cache.batch_caches")
        self.stage.join(rows, batches.merge_caches(caches, by_rows=self._by_rows))

    def step(self) -> None:
        for _ in range(_STEPS):
            self.stage.step()
        self.stage.read()

    def leave(self) -> None:
        self.stage.leave([self._made - 1])


def cpu_s(act: Callable[[], object]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def decode(model: Any, lengths: Sequence[int]) -> tuple[dict[str, float], dict[bool, Batch]]:
    """Return the CPU milliseconds of a step in both layouts, and the batches."""
    batches = {by_rows: Batch(model, lengths, by_rows=by_rows) for by_rows in (False, True)}
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(_ROUNDS * (1 if lengths is MIXED else 3)):
        for by_rows in (number % 2 == 0, number % 2 == 1):
            found[by_rows].append(cpu_s(batches[by_rows].step) / _STEPS)
    padded, rows = (min(found[by_rows]) for by_rows in (False, True))
    times = {"padded_ms": 1e3 * padded, "rows_ms": 1e3 * rows, "ratio": padded / rows}
    return times, batches


def changes(batches: dict[bool, Batch]) -> dict[str, float]:
    """Return what the step after a join and after a leave costs more than a usual one, in CPU milliseconds."""
    found: dict[str, list[float]] = {}
    for _ in range(_ROUNDS):
        for by_rows, batch in batches.items():
            name = "rows" if by_rows else "padded"
            caches = batch.fill(500)

            def join(batch: Batch = batch, caches: list[Any] = caches) -> None:
                batch.join([caches], [500])
                batch.step()

            def leave(batch: Batch = batch) -> None:
                batch.leave()
                batch.step()

            usual = cpu_s(batch.step)
            found.setdefault(f"{name}_join_ms", []).append(1e3 * (cpu_s(join) - usual))
            found.setdefault(f"{name}_leave_ms", []).append(1e3 * (cpu_s(leave) - usual))
    return {name: statistics.median(times) for name, times in found.items()}


def concurrency(*, by_rows: bool, are_full: bool) -> dict[str, float]:
    """Return how many requests of mixed lengths run at once in the memory of four full contexts, while others wait.

    Half of each is its prompt. With `are_full` all of them use all of their `max_tokens`: the worst case for memory that
    is given as it is needed. Otherwise answers of every share of `max_tokens` are equally frequent.
    """
    memory = MemoryGuard(
        budget=MemoryBudget(
            footprint=KvFootprint(token_bytes=1, by_rows=by_rows),
            limit_bytes=1 << 30,
            weights_bytes=0,
            activation_bytes=0,
            kv_bytes=_CONTEXTS * 4_096,
            prefix_kept_bytes=0,
            prefix_most_bytes=0,
            load=ServingLoad(context_length=4_096, concurrency=64),
        )
    )
    waiting: list[Job] = []
    for number in range(192):
        # In an order that is neither sorted nor random.
        tokens = MIXED[number * 11 % 16]
        prompt = (1,) * (tokens // 2)
        more = tokens - len(prompt)
        waiting.append(Job(id=number, prompt=prompt, max_tokens=more, sampling=_GREEDY))
    running: dict[int, tuple[Job, int]] = {}
    counts: list[int] = []
    held: list[int] = []
    read_again = 0
    while waiting:
        for stopped in memory.grow({at: tokens + 16 for at, (_, tokens) in running.items()}):
            job, tokens = running.pop(stopped)
            made = tokens - len(job.prompt)
            waiting.insert(0, dataclasses.replace(job, emitted=(1,) * made))
            read_again += tokens
        while waiting and memory.may_join(waiting[0]):
            job = waiting.pop(0)
            memory.reserve(job)
            running[job.id] = job, len(job.prompt) + len(job.emitted)
        counts.append(len(running))
        held.append(sum(tokens for _, tokens in running.values()))
        for at, (job, tokens) in list(running.items()):
            running[at] = job, tokens + 16
            share = 1.0 if are_full else (at * 7 + at // 16 * 5) % 16 / 16
            if tokens + 16 >= len(job.prompt) + share * job.max_tokens:
                memory.release(at)
                del running[at]
    return {
        "mean": round(statistics.mean(counts), 1),
        "most": max(counts),
        "stopped": memory.preemptions,
        "read_again": read_again,
        "full": round(statistics.mean(held) / memory.budget.kv_bytes, 2),
    }


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        blas.install(Path(folder))
        mx = module("mlx.core")
        mx.random.seed(1)
        model = build(_CONFIG)
        mx.eval(model.parameters())
        compared: dict[str, float] = {}
        figures: dict[str, Any] = {}
        for name, lengths in SCENES.items():
            times, batches = decode(model, lengths)
            compared[f"{name}_tokens_per_cpu_s"] = round(times["ratio"], 2)
            figures[name] = {key: round(value, 1) for key, value in times.items()}
            if lengths is MIXED:
                held = {one: batches[one].stage.nbytes for one in batches}
                compared["mixed_16_memory"] = round(held[False] / held[True], 2)
                figures["changes"] = {k: round(v, 1) for k, v in changes(batches).items()}
            print(f"{name}: {figures[name]}", flush=True)
    for name, are_full in (("concurrent", True), ("early_ends", False)):
        padded, rows = (concurrency(by_rows=one, are_full=are_full) for one in (False, True))
        compared[f"{name}_mean"] = round(rows["mean"] / padded["mean"], 2)
        compared[f"{name}_most"] = round(rows["most"] / padded["most"], 2)
        figures[name] = {"padded": padded, "rows": rows, "full_contexts": _CONTEXTS}
    finish("rows", compared, {**figures, "rounds": _ROUNDS, "steps": _STEPS, "smoke": SMOKE})


if __name__ == "__main__":
    main()
