"""The first token of a 4k prompt after a restart, in tiny hybrid and window models: from files, divided by computing it.

In this process, with the engine's prefix cache: a new cache with the folder of the one before stands for a restart.
"""

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

_TOKENS: Final = sized(4_096, smoke=1_024)
_PIECE: Final = 512
_LIMIT_BYTES: Final = 4 << 30


def measure(family: str) -> dict[str, float]:
    """Return the seconds to the first token, cold and from files, and their ratio."""
    model = build({**BASE, **FAMILIES[family], "model_type": family})
    mx.eval(model.parameters())
    prompt = random.Random(1).choices(range(64), k=_TOKENS)

    def first_token(folder: Path) -> float:
        files = BlockFiles(folder, limit_bytes=_LIMIT_BYTES)
        cache = BlockPrefixCache(
            lambda: layer_caches.make_caches(model, KvOptions()),
            limit_bytes=_LIMIT_BYTES,
            disk=BlockDisk(files=files, model=family),
        )
        began = time.perf_counter()
        caches, length = cache.fetch(prompt)
        for start in range(length, _TOKENS - 1, _PIECE):
            stop = min(start + _PIECE, _TOKENS - 1)
            _read(model, prompt[start:stop], caches)
            cache.store(prompt[:stop], caches, is_checkpoint=stop == _TOKENS - 1)
        _read(model, prompt[-1:], caches)
        took_s = time.perf_counter() - began
        files.flush(60.0)
        files.close()
        return took_s

    with tempfile.TemporaryDirectory() as root:
        cold_s, warm_s = (first_token(Path(root) / "kv") for _ in range(2))
    return {
        f"{family}_cold_s": round(cold_s, 4),
        f"{family}_warm_s": round(warm_s, 4),
        f"{family}_warm_of_cold": round(warm_s / cold_s, 4),
    }


def _read(model: Any, tokens: list[int], caches: list[Any]) -> None:
    mx.eval(model(mx.array([tokens]), cache=caches)[0, -1], [cache.state for cache in caches])
