"""The first token of a 16k prompt after a restart, in tiny hybrid and window models: from files, divided by computing it.

A second prompt shares all but the last eighth with the first one. In this process, with the engine's prefix cache: a
new cache with the folder of the one before stands for a restart.
"""

import itertools
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from bench.harness import sized
from engine.cache import layer_caches
from engine.cache.block_files import BlockFiles
from engine.cache.disk_blocks import BlockDisk
from engine.cache.interface import KvOptions
from engine.cache.prefix_cache import BlockPrefixCache
from tests.support.model_geometries import BASE, FAMILIES, build

_TOKENS: Final = sized(16_384, smoke=2_048)
_PIECE: Final = 512
# A layer that keeps all tokens, and one with a window or a state: more take minutes on a CPU.
_SIZE: Final = {
    "num_hidden_layers": 2,
    "full_attn_idxs": [1],
    "full_attention_interval": 2,
    "sliding_window_pattern": 2,
}
_LIMIT_BYTES: Final = 4 << 30


def measure(family: str) -> dict[str, float]:
    """Return the seconds to the first token, cold and from files, and their ratio."""
    model = build({**BASE, **FAMILIES[family], **_SIZE, "model_type": family})
    mx.eval(model.parameters())
    prompt, other = (random.Random(seed).choices(range(64), k=_TOKENS) for seed in (1, 2))
    shared = _TOKENS - _TOKENS // 8
    distance = layer_caches.measure_footprint(model, KvOptions()).checkpoint_tokens

    def first_token(folder: Path, prompt: list[int]) -> float:
        files = BlockFiles(folder, limit_bytes=_LIMIT_BYTES)
        cache = BlockPrefixCache(
            lambda: layer_caches.make_caches(model, KvOptions()),
            limit_bytes=_LIMIT_BYTES,
            checkpoint_tokens=distance,
            disk=BlockDisk(files=files, model=family),
        )
        began = time.perf_counter()
        caches, length = cache.fetch(prompt)
        end = _TOKENS - 1
        checkpoints = (*cache.plan_checkpoints(prompt, start=length), end)
        stops = sorted({*range(length + _PIECE, end, _PIECE), *checkpoints})
        for start, stop in itertools.pairwise([length, *(stop for stop in stops if stop > length)]):
            _read(model, prompt[start:stop], caches)
            cache.store(prompt[:stop], caches, is_checkpoint=stop in checkpoints)
        _read(model, prompt[-1:], caches)
        took_s = time.perf_counter() - began
        files.flush(60.0)
        files.close()
        return took_s

    with tempfile.TemporaryDirectory() as root:
        files = Path(root) / "kv"
        cold_s, warm_s = (first_token(files, prompt) for _ in range(2))
        part_s = first_token(files, [*prompt[:shared], *other[shared:]])
    return {
        f"{family}_cold_s": round(cold_s, 4),
        f"{family}_warm_s": round(warm_s, 4),
        f"{family}_warm_of_cold": round(warm_s / cold_s, 4),
        f"{family}_seven_eighths_of_cold": round(part_s / cold_s, 4),
    }


def _read(model: Any, tokens: list[int], caches: list[Any]) -> None:
    mx.eval(model(mx.array([tokens]), cache=caches)[0, -1], [cache.state for cache in caches])
