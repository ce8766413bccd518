"""Finds out what mlx-lm can do with a model over several ranks, without reading its weights. A child process.

    python -m nodeagent.engine.splitting FOLDER PARENT

The model is built as an engine builds it (engine/model/loading.py), with weights that are lazy; then split by a group
that is none, and asked for a token that nobody computes: every shape is there, and mlx-lm's complaints are. What
comes out is one line of JSON (nodeagent/geometry/splitting.py reads it). Ends by itself if the process PARENT does, if it
takes too long, and if it should ever begin to compute with the weights.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Final, TypeAlias

import mlx.core as mx
from mlx_lm.utils import load_model

from nodeagent.engine.asking import Answer, Group, Model, answer_complaint, ask, named_arrays

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
_COMPLAINTS: Final = (
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
        taken = _taken(one, arrays.get(name))
        total += taken
        half += taken if one.dtype in (mx.float16, mx.bfloat16) else 0
    return total, half


def _taken(part: Any, array: Any) -> int:
    """Return the bytes that are kept for a part of an array; None: it is no part, but new."""
    if array is None or array.nbytes > part.nbytes + _SLACK_BYTES or array.ndim != part.ndim:
        return int(part.nbytes)
    cut = next((at for at in range(part.ndim) if part.shape[at] != array.shape[at]), part.ndim)
    is_run = all(length == 1 for length in part.shape[:cut])
    return int(array.nbytes if is_run and cut < part.ndim else part.nbytes)


class Folder:
    """One folder's model, built anew for each try: splitting one changes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build(self) -> Model:
        return load_model(self._folder, lazy=True)[0]

    def tensor(self, size: int, whole: Answer) -> Weight | str:
        """Return what one share weighs, or why there is none of that size."""
        # The last rank falls short where a width has a remainder.
        group = Group(size - 1, size)
        try:
            model = self.build()
            model.shard(group)
            share = ask(model, group)
        except _COMPLAINTS as error:
            return " ".join(str(error).split())[:200] or type(error).__name__
        return answer_complaint(whole, share, size) or weigh_share(model, self.build())

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
            group = Group(0, 2)
            dealt.pipeline(group, split=[1, len(weights) - 1])
            ask(model, group)
        except _COMPLAINTS:
            return nothing
        # A type whose ranks keep more than their layers and the rest cannot be proven to fit.
        kept = weigh(model.parameters())
        return (weights, rest) if kept[0] == rest[0] + weights[-1][0] else nothing


def find_out(folder: Path) -> dict[str, object]:
    """Return what the model in the folder can be split into."""
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # a compiled function would not be called again, and its shapes not seen
    model = Folder(folder)
    tried: dict[int, Weight | str] = {}
    built = model.build()
    if hasattr(built, "shard"):
        whole = ask(built, None)
        tried = {size: model.tensor(size, whole) for size in range(2, MOST_RANKS + 1)}
    layers, rest = model.pipelined()
    return {
        "tensor": {size: _told(one) for size, one in tried.items() if not isinstance(one, str)},
        "refused": {size: one for size, one in tried.items() if isinstance(one, str)},
        "layers": [_told(layer) for layer in layers],
        "rest": _told(rest),
    }


def _told(weight: Weight) -> dict[str, int]:
    return {"total_bytes": weight[0], "half_bytes": weight[1]}


def _guard(parent: int) -> None:
    """End the process where it must not go on; in a thread of its own, which mlx lets run while it computes."""
    never = threading.Event()
    for _ in range(_MOST_S * 100):
        if os.getppid() != parent:
            _end("its parent has ended")
        if mx.get_active_memory() > _MOST_BYTES:
            _end("mlx-lm computes with the model's weights where it was only to look at them")
        never.wait(0.01)
    _end(f"it was not done within {_MOST_S} s")


def _end(why: str) -> None:
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Print what was found out about the folder that the command line names."""
    folder, parent = sys.argv[1:]
    threading.Thread(target=_guard, args=(int(parent),), daemon=True).start()
    sys.stdout.write(json.dumps(find_out(Path(folder))) + "\n")


if __name__ == "__main__":
    main()
