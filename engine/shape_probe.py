"""The shape probe: a child process that finds the splits of a model over ranks without reading its weights.

    python -m engine.shape_probe FOLDER PARENT

It builds the model as an engine does (engine/model/loader.py), with lazy weights, splits it with a group that only has a rank and a size, and
traces an answer that is never computed: mlx knows every shape, and mlx-lm raises its errors. It prints one line of JSON
(models/split_options.py reads it). It ends by itself if the process PARENT ends, if it takes too long, or if mlx-lm
starts to compute with the weights.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from machinery.process_secrets import disable_core_dumps

Model: TypeAlias = Any  # an mlx.nn.Module; mlx ships no types
Shape: TypeAlias = tuple[int, ...]

# Bytes of arrays, and the part of them in float16 or bfloat16, which engines widen on Linux.
Weight: TypeAlias = tuple[int, int]

MOST_RANKS: Final = 16
# Tokens of one answer: more than one, so that the axes of tokens and requests cannot be confused.
_TOKENS: Final = 5
# The most bytes that a probe computes, whatever the model's size: constants such as tables of rotary embeddings.
_MOST_BYTES: Final = 512 * 2**20
# A model of a thousand files takes a minute; a busy Mac needs longer to import mlx-lm.
_MOST_S: Final = 300
# mx.contiguous does not copy a slice of the first axis whose size is this close to that of its array; the whole array then
# stays in memory (extra_bytes in Contiguous::eval_cpu, mlx/backend/cpu/primitives.cpp).
_SLACK_BYTES: Final = 16384
# The errors of mlx-lm for a model that cannot be divided: mx.split, plain //=, asserts, and shapes that do not fit.
_MODEL_ERRORS: Final = (
    *(ValueError, TypeError, AssertionError, AttributeError, LookupError, ArithmeticError),
    RuntimeError,
)


class StubGroup:
    """A rank of a group as `shard` and `pipeline` see it, without any connection."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@contextmanager
def _record_shapes(group: StubGroup | None) -> Iterator[list[tuple[Shape, ...]]]:
    """Record the shapes that attention gets, and replace collectives by functions with results of the same shape."""
    recorded: list[tuple[Shape, ...]] = []
    fast = mx.fast.scaled_dot_product_attention

    def attend(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        recorded.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return fast(q, k, v, **rest)

    replacements: dict[str, Any] = {}
    if group is not None:
        replacements = {
            **dict.fromkeys(("all_sum", "send", "recv_like"), lambda x, *_, **__: x),
            "all_gather": lambda x, **_: mx.concatenate([x] * group.size(), axis=0),
        }
    before = {name: getattr(mx.distributed, name) for name in replacements}
    mx.fast.scaled_dot_product_attention = attend
    try:
        for name, replacement in replacements.items():
            setattr(mx.distributed, name, replacement)
        yield recorded
    finally:
        mx.fast.scaled_dot_product_attention = fast
        for name, real in before.items():
            setattr(mx.distributed, name, real)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTrace:
    """The shapes of an answer that was not computed."""

    logits: Shape
    attention: list[tuple[Shape, ...]]
    """Queries, keys and values, call by call."""
    caches: list[list[Shape]]
    """The caches, layer by layer."""


def trace(model: Model, group: StubGroup | None, *, tokens: int = _TOKENS) -> ShapeTrace:
    """Return the shapes with which a model, or a rank's part of it, answers `tokens` tokens."""
    with _record_shapes(group) as recorded:
        caches = make_prompt_cache(model)
        logits = model(mx.zeros((1, tokens), dtype=mx.int32), cache=caches)
    return ShapeTrace(
        logits=tuple(logits.shape),
        attention=recorded,
        caches=[[tuple(one.shape) for _, one in named_arrays(cache.state)] for cache in caches],
    )


def named_arrays(tree: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a tree, with their paths."""
    pairs: Any = tree_flatten(tree)
    return [(name, one) for name, one in pairs if isinstance(one, mx.array)]


def head_mismatch(whole: tuple[Shape, ...], share: tuple[Shape, ...], size: int) -> str:
    """Return the error in one attention call of a part, from the shapes of queries, keys and values; "" if none.

    mlx-lm divides heads by `//=`. With a remainder it may continue with heads of another size and give wrong answers.
    """
    names = ("attention heads", "KV heads", "KV heads")
    for name, before, after in zip(names, whole, share, strict=True):
        if before[-1] != after[-1]:
            return f"{size} does not divide {before[1]} {name}"
        heads, rank_heads = before[1], after[1]
        divided = rank_heads * size == heads
        # With fewer KV heads than ranks, some types give several ranks the same head; a latent belongs to no head.
        shared = name == "KV heads" and rank_heads == 1 and (heads == 1 or size % heads == 0)
        if not divided and not shared:
            return f"{size} does not divide {heads} {name}"
    return ""


def trace_mismatch(whole: ShapeTrace, share: ShapeTrace, size: int) -> str:
    """Return why a part's answer cannot be that of the whole model; "" if the shapes agree."""
    if share.logits != whole.logits:
        return f"its logits would have the shape {share.logits} instead of {whole.logits}"
    if len(share.attention) != len(whole.attention) or len(share.caches) != len(whole.caches):
        return "a rank's part calls attention or caches in another way than the whole model"
    for before, after in zip(whole.attention, share.attention, strict=True):
        mismatch = head_mismatch(before, after, size)
        if mismatch:
            return mismatch
    return ""


def weigh(parameters: Any) -> Weight:
    """Return the bytes of the arrays of a tree."""
    arrays = [one for _, one in named_arrays(parameters)]
    half = sum(array.nbytes for array in arrays if array.dtype in (mx.float16, mx.bfloat16))
    return sum(array.nbytes for array in arrays), half


def weigh_share(share: Model, whole: Model) -> Weight:
    """Return the most bytes that the arrays of a part take."""
    arrays = dict(named_arrays(whole.parameters()))
    total = half = 0
    for name, one in named_arrays(share.parameters()):
        kept = _kept_bytes(one, arrays.get(name))
        total += kept
        half += kept if one.dtype in (mx.float16, mx.bfloat16) else 0
    return total, half


def _kept_bytes(part: Any, array: Any) -> int:
    """Return the bytes that stay in memory for a part of an array; `array` is None for a new array."""
    if array is None or array.nbytes > part.nbytes + _SLACK_BYTES or array.ndim != part.ndim:
        return int(part.nbytes)
    cut = next((at for at in range(part.ndim) if part.shape[at] != array.shape[at]), part.ndim)
    is_run = all(length == 1 for length in part.shape[:cut])
    return int(array.nbytes if is_run and cut < part.ndim else part.nbytes)


class SplitProber:
    """The model of one folder, rebuilt for each try because splitting changes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build(self) -> Model:
        return load_model(self._folder, lazy=True, trust_remote_code=False)[0]

    def tensor(self, size: int, whole: ShapeTrace) -> Weight | str:
        """Return the bytes of one part of a tensor split, or why the model cannot be split among `size` ranks."""
        # A width with a remainder is too small on the last rank.
        group = StubGroup(size - 1, size)
        try:
            model = self.build()
            model.shard(group)
            share = trace(model, group)
        except _MODEL_ERRORS as error:
            return " ".join(str(error).split())[:200] or type(error).__name__
        return trace_mismatch(whole, share, size) or weigh_share(model, self.build())

    def pipelined(self) -> tuple[list[Weight], Weight]:
        """Return the bytes of each layer, and of the rest that every rank has; no layers if there is no pipeline split."""
        model = self.build()
        inner: Any = getattr(model, "model", None)
        nothing: tuple[list[Weight], Weight] = ([], (0, 0))
        if not hasattr(inner, "pipeline") or len(inner.layers) < 2:
            return nothing
        weights = [weigh(layer.parameters()) for layer in inner.layers]
        total = weigh(model.parameters())
        rest = (
            total[0] - sum(weight[0] for weight in weights),
            total[1] - sum(weight[1] for weight in weights),
        )
        try:
            # An uneven split, which raises an error for types that do not accept one.
            group = StubGroup(0, 2)
            inner.pipeline(group, split=[1, len(weights) - 1])
            trace(model, group)
        except _MODEL_ERRORS:
            return nothing
        # If ranks keep more than their layers and the rest, no memory proof is possible.
        kept = weigh(model.parameters())
        return (weights, rest) if kept[0] == rest[0] + weights[-1][0] else nothing


def probe_splits(folder: Path) -> dict[str, object]:
    """Return the possible splits of the model in the folder."""
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # a compiled function is not called again, so its shapes would be missed
    model = SplitProber(folder)
    results: dict[int, Weight | str] = {}
    built = model.build()
    if hasattr(built, "shard"):
        whole = trace(built, None)
        results = {size: model.tensor(size, whole) for size in range(2, MOST_RANKS + 1)}
    layers, rest = model.pipelined()
    return {
        "tensor": {
            size: _as_json(one) for size, one in results.items() if not isinstance(one, str)
        },
        "refused": {size: one for size, one in results.items() if isinstance(one, str)},
        "layers": [_as_json(layer) for layer in layers],
        "rest": _as_json(rest),
    }


def _as_json(weight: Weight) -> dict[str, int]:
    return {"total_bytes": weight[0], "half_bytes": weight[1]}


def _watchdog(parent: int) -> None:
    """Kill the process if it must not continue. Runs in a thread of its own, which mlx does not block."""
    never = threading.Event()
    for _ in range(_MOST_S * 100):
        if os.getppid() != parent:
            _kill_self("its parent has ended")
        if mx.get_active_memory() > _MOST_BYTES:
            _kill_self("mlx-lm computes with the model's weights, which the probe must not read")
        never.wait(0.01)
    _kill_self(f"the probe did not finish within {_MOST_S} s")


def _kill_self(reason: str) -> None:
    sys.stderr.write(f"{reason}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Print the possible splits of the model in the folder that the command line names."""
    disable_core_dumps()
    folder, parent = sys.argv[1:]
    threading.Thread(target=_watchdog, args=(int(parent),), daemon=True).start()
    sys.stdout.write(json.dumps(probe_splits(Path(folder))) + "\n")


if __name__ == "__main__":
    main()
