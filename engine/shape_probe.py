"""Has a rank's share of a model answer without computing anything, and judges the shapes. For engine/splitting.py.

mlx's arrays are lazy: an answer that nobody reads has a shape, and mlx-lm's complaints come all the same.

Finds out what mlx-lm can do with a model over several ranks, without reading its weights. A child process.

    python -m engine.shape_probe FOLDER PARENT

The model is built as an engine builds it (engine/model/loading.py), with weights that are lazy; then split by a group
that is none, and asked for a token that nobody computes: every shape is there, and mlx-lm's complaints are. What
comes out is one line of JSON (models/split_options.py reads it). Ends by itself if the process PARENT does, if it
takes too long, and if it should ever begin to compute with the weights.
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

Model: TypeAlias = Any  # an mlx.nn.Module; mlx ships no types
Shape: TypeAlias = tuple[int, ...]

# Tokens that are asked for at once: more than one, so that axes of tokens and of requests cannot be taken for another.
_TOKENS: Final = 5


class StubGroup:
    """A rank of a group as `shard` and `pipeline` look at it; it connects nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@contextmanager
def _record_shapes(group: StubGroup | None) -> Iterator[list[tuple[Shape, ...]]]:
    """Note what attention gets, and let collectives return what has the shape of their results."""
    seen: list[tuple[Shape, ...]] = []
    fast = mx.fast.scaled_dot_product_attention

    def attend(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return fast(q, k, v, **rest)

    stands_in: dict[str, Any] = {}
    if group is not None:
        stands_in = {
            **dict.fromkeys(("all_sum", "send", "recv_like"), lambda x, *_, **__: x),
            "all_gather": lambda x, **_: mx.concatenate([x] * group.size(), axis=0),
        }
    before = {name: getattr(mx.distributed, name) for name in stands_in}
    mx.fast.scaled_dot_product_attention = attend
    try:
        for name, stand_in in stands_in.items():
            setattr(mx.distributed, name, stand_in)
        yield seen
    finally:
        mx.fast.scaled_dot_product_attention = fast
        for name, real in before.items():
            setattr(mx.distributed, name, real)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTrace:
    """The shapes of an answer that nobody computed."""

    logits: Shape
    attention: list[tuple[Shape, ...]]
    """Of queries, keys and values, call by call."""
    caches: list[list[Shape]]
    """What each layer keeps."""


def trace(model: Model, group: StubGroup | None, *, tokens: int = _TOKENS) -> ShapeTrace:
    """Have a model, or a group's share of one, answer so many tokens, as far as shapes go."""
    with _record_shapes(group) as seen:
        caches = make_prompt_cache(model)
        logits = model(mx.zeros((1, tokens), dtype=mx.int32), cache=caches)
    return ShapeTrace(
        logits=tuple(logits.shape),
        attention=seen,
        caches=[[tuple(one.shape) for _, one in named_arrays(cache.state)] for cache in caches],
    )


def named_arrays(tree: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a tree, with their places."""
    pairs: Any = tree_flatten(tree)
    return [(name, one) for name, one in pairs if isinstance(one, mx.array)]


def head_mismatch(whole: tuple[Shape, ...], share: tuple[Shape, ...], size: int) -> str:
    """Return what is wrong with one attention of a share, by the shapes of queries, keys and values; "" if nothing.

    mlx-lm divides heads by `//=`: with a remainder it may go on with heads of another size, and answer nonsense.
    """
    names = ("attention heads", "KV heads", "KV heads")
    for name, before, after in zip(names, whole, share, strict=True):
        if before[-1] != after[-1]:
            return f"{size} does not divide {before[1]} {name}"
        heads, rank_heads = before[1], after[1]
        divided = rank_heads * size == heads
        # With fewer KV heads than ranks some types give several ranks the same one; a latent belongs to no head.
        shared = name == "KV heads" and rank_heads == 1 and (heads == 1 or size % heads == 0)
        if not divided and not shared:
            return f"{size} does not divide {heads} {name}"
    return ""


def trace_mismatch(whole: ShapeTrace, share: ShapeTrace, size: int) -> str:
    """Return why a share's answer cannot be the whole's; "" if nothing speaks against it."""
    if share.logits != whole.logits:
        return f"its logits would have the shape {share.logits} instead of {whole.logits}"
    if len(share.attention) != len(whole.attention) or len(share.caches) != len(whole.caches):
        return "a share attends otherwise than the whole"
    for before, after in zip(whole.attention, share.attention, strict=True):
        complaint = head_mismatch(before, after, size)
        if complaint:
            return complaint
    return ""


# Bytes of arrays, and how many of them are float16 or bfloat16, which engines widen on Linux.
Weight: TypeAlias = tuple[int, int]

MOST_RANKS: Final = 16
# So much is computed at most, whatever the size of the model: constants such as the tables of rotary embeddings.
_MOST_BYTES: Final = 512 * 2**20
# A model of a thousand files is looked at in a minute; and a busy Mac takes longer to import mlx-lm.
_MOST_S: Final = 300
# mx.contiguous does not copy a slice of the first axis that is this close to the size of its array, all of which is then
# kept (extra_bytes in Contiguous::eval_cpu, mlx/backend/cpu/primitives.cpp).
_SLACK_BYTES: Final = 16384
# What mlx-lm raises where a model cannot be divided: mx.split, plain //=, asserts, and shapes that do not fit.
_MODEL_ERRORS: Final = (
    *(ValueError, TypeError, AssertionError, AttributeError, LookupError, ArithmeticError),
    RuntimeError,
)


def weigh(parameters: Any) -> Weight:
    """Return what the arrays of a tree take."""
    arrays = [one for _, one in named_arrays(parameters)]
    half = sum(one.nbytes for one in arrays if one.dtype in (mx.float16, mx.bfloat16))
    return sum(one.nbytes for one in arrays), half


def weigh_share(share: Model, whole: Model) -> Weight:
    """Return what the arrays of a share take, at most."""
    arrays = dict(named_arrays(whole.parameters()))
    total = half = 0
    for name, one in named_arrays(share.parameters()):
        taken = _kept_bytes(one, arrays.get(name))
        total += taken
        half += taken if one.dtype in (mx.float16, mx.bfloat16) else 0
    return total, half


def _kept_bytes(part: Any, array: Any) -> int:
    """Return the bytes that are kept for a part of an array; None: it is no part, but new."""
    if array is None or array.nbytes > part.nbytes + _SLACK_BYTES or array.ndim != part.ndim:
        return int(part.nbytes)
    cut = next((at for at in range(part.ndim) if part.shape[at] != array.shape[at]), part.ndim)
    is_run = all(length == 1 for length in part.shape[:cut])
    return int(array.nbytes if is_run and cut < part.ndim else part.nbytes)


class SplitProber:
    """One folder's model, built anew for each try: splitting one changes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build(self) -> Model:
        return load_model(self._folder, lazy=True)[0]

    def tensor(self, size: int, whole: ShapeTrace) -> Weight | str:
        """Return what one share weighs, or why there is none of that size."""
        # The last rank falls short where a width has a remainder.
        group = StubGroup(size - 1, size)
        try:
            model = self.build()
            model.shard(group)
            share = trace(model, group)
        except _MODEL_ERRORS as error:
            return " ".join(str(error).split())[:200] or type(error).__name__
        return trace_mismatch(whole, share, size) or weigh_share(model, self.build())

    def pipelined(self) -> tuple[list[Weight], Weight]:
        """Return what each layer weighs, and what every rank has besides; no layers if they cannot be dealt out."""
        model = self.build()
        dealt: Any = getattr(model, "model", None)
        nothing: tuple[list[Weight], Weight] = ([], (0, 0))
        if not hasattr(dealt, "pipeline") or len(dealt.layers) < 2:
            return nothing
        weights = [weigh(layer.parameters()) for layer in dealt.layers]
        total = weigh(model.parameters())
        rest = total[0] - sum(one[0] for one in weights), total[1] - sum(one[1] for one in weights)
        try:
            # Uneven, so that a type which takes no split is found out.
            group = StubGroup(0, 2)
            dealt.pipeline(group, split=[1, len(weights) - 1])
            trace(model, group)
        except _MODEL_ERRORS:
            return nothing
        # A type whose ranks keep more than their layers and the rest cannot be proven to fit.
        kept = weigh(model.parameters())
        return (weights, rest) if kept[0] == rest[0] + weights[-1][0] else nothing


def probe_splits(folder: Path) -> dict[str, object]:
    """Return what the model in the folder can be split into."""
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # a compiled function would not be called again, and its shapes not seen
    model = SplitProber(folder)
    tried: dict[int, Weight | str] = {}
    built = model.build()
    if hasattr(built, "shard"):
        whole = trace(built, None)
        tried = {size: model.tensor(size, whole) for size in range(2, MOST_RANKS + 1)}
    layers, rest = model.pipelined()
    return {
        "tensor": {size: _as_json(one) for size, one in tried.items() if not isinstance(one, str)},
        "refused": {size: one for size, one in tried.items() if isinstance(one, str)},
        "layers": [_as_json(layer) for layer in layers],
        "rest": _as_json(rest),
    }


def _as_json(weight: Weight) -> dict[str, int]:
    return {"total_bytes": weight[0], "half_bytes": weight[1]}


def _watchdog(parent: int) -> None:
    """End the process where it must not go on; in a thread of its own, which mlx lets run while it computes."""
    never = threading.Event()
    for _ in range(_MOST_S * 100):
        if os.getppid() != parent:
            _kill_self("its parent has ended")
        if mx.get_active_memory() > _MOST_BYTES:
            _kill_self("mlx-lm computes with the model's weights where it was only to look at them")
        never.wait(0.01)
    _kill_self(f"it was not done within {_MOST_S} s")


def _kill_self(why: str) -> None:
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Print what was found out about the folder that the command line names."""
    folder, parent = sys.argv[1:]
    threading.Thread(target=_watchdog, args=(int(parent),), daemon=True).start()
    sys.stdout.write(json.dumps(probe_splits(Path(folder))) + "\n")


if __name__ == "__main__":
    main()
