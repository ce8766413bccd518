"""MLX's group of ranks: connects them, and keeps one rank's part of a model. Worker thread only.

`mx.distributed.init` holds Python's lock while it waits. No other thread of this process runs until all ranks have
come: the process answers nothing and cannot stop the wait. So the ranks first meet on our own channels
(ranks/rendezvous.py), and a kernel timer ends the process if MLX still waits. Without it, rank 0 of a ring waits forever
for a rank that died in between, and the others wait 31 s (measured, mlx 0.32.4).
"""

import inspect
import logging
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.errors import GroupError
from schemas.shardgroup import Parallelism
from schemas.wire.engine_config import GroupConfig

# More than the 31 s after which MLX's ring gives up by itself with a reason.
_CONNECT_S = 40.0
# The last rank connects before it accepts; all others accept before they connect. If rank 0 does not listen yet, MLX
# tries again only after a second.
_HEAD_START_S = 0.15

log = logging.getLogger(__name__)


def init_group(group: GroupConfig, pause: Callable[[float], object]) -> Any:
    """Return the connected group (an mx.distributed.Group); the environment says where its ranks are.

    Raises:
        GroupError: MLX cannot connect the ranks.

    """
    if group.backend == "ring" and group.rank == group.world_size - 1:
        pause(_HEAD_START_S)
    log.info(
        "connecting to the other ranks; SIGALRM ends this process after the limit",
        extra={"rank": group.rank, "epoch": group.epoch, "limit_s": _CONNECT_S},
    )
    signal.setitimer(signal.ITIMER_REAL, _CONNECT_S)
    try:
        backend = "ring" if group.backend == "ring" else "jaccl"
        found = mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, ValueError) as error:
        raise GroupError(
            f"MLX could not connect rank {group.rank} to the others: {error}"
        ) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if (found.rank(), found.size()) != (group.rank, group.world_size):
        raise GroupError(
            f"MLX treats this process as rank {found.rank()} of {found.size()}, but it is rank {group.rank} of "
            f"{group.world_size}: check MLX_RANK and MLX_HOSTFILE or MLX_IBV_DEVICES"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSplit:
    """The split of a model over the ranks of a group."""

    group: Any
    """An mx.distributed.Group: the ranks that share the model."""
    parallelism: Parallelism = "Tensor"
    layers: tuple[int, ...] = ()
    """Number of layers of each rank, in rank order; rank 0 has the last layers. () leaves the split to mlx-lm."""


def split_model(model: Any, parts: ModelSplit) -> None:
    """Keep only this rank's part of a model whose weights are still lazy; weights of other ranks are never read.

    A rank of a Pipeline needs the weight files of its own layers only (absent_tensors.py). Call this before caches are
    made and before the weights are read. It sends nothing and waits for no rank, and does the same as
    `mlx_lm.utils.sharded_load`.

    Raises:
        ValueError: the model type cannot be split like that, or the group's size does not divide its sizes.

    """
    pipeline = getattr(getattr(model, "model", None), "pipeline", None)
    supported = ["Tensor"] * hasattr(model, "shard") + ["Pipeline"] * (pipeline is not None)
    if parts.parallelism not in supported:
        cure = (
            f"parallelism {supported[0]} works"
            if supported
            else "run it on one Mac with enough memory"
        )
        raise ValueError(
            f"model type {getattr(model, 'model_type', '')} cannot be split over {parts.group.size()} Macs by "
            f"{parts.parallelism} in mlx-lm; {cure}"
        )
    if pipeline is not None and parts.parallelism == "Pipeline":
        _pipeline(model, pipeline, parts)
        return
    before = dict(_heads(model))
    model.shard(parts.group)
    _check_heads(before, dict(_heads(model)), parts.group.size())


def _pipeline(model: Any, pipeline: Any, parts: ModelSplit) -> None:
    count, size = len(model.layers), parts.group.size()
    takes_split = "split" in inspect.signature(pipeline).parameters
    if parts.layers and (len(parts.layers) != size or sum(parts.layers) != count):
        raise ValueError(
            f"the split {','.join(map(str, parts.layers))} does not divide {count} layers among {size} ranks"
        )
    if parts.layers and takes_split:
        pipeline(parts.group, split=list(parts.layers))
        return
    pipeline(parts.group)
    own = len([layer for layer in model.layers if layer is not None])
    if parts.layers and own != parts.layers[parts.group.rank()]:
        raise ValueError(
            f"model type {model.model_type} splits its layers itself in mlx-lm: rank {parts.group.rank()} gets "
            f"{own}, not {parts.layers[parts.group.rank()]}; leave group.layers out"
        )


def _heads(model: Any) -> Iterator[tuple[tuple[int, str], int]]:
    """Yield the numbers of heads in each layer's modules, which mlx-lm divides without a check."""
    for at, layer in enumerate(model.layers):
        for name, module in layer.named_modules():
            for key, value in vars(module).items():
                if "heads" in key and type(value) is int:
                    yield (at, f"{name}.{key}"), value


def _check_heads(
    before: dict[tuple[int, str], int], after: dict[tuple[int, str], int], size: int
) -> None:
    """Refuse a split that mlx-lm would load but that fails at the first token, or gives wrong answers."""
    for (at, name), heads in before.items():
        now = after.get((at, name), heads)
        # Some model types repeat KV heads if there are fewer of them than ranks.
        is_repeated = now == 1 and size % heads == 0
        if now not in (heads, heads / size) and not is_repeated:
            raise ValueError(
                f"{name} of layer {at} is {heads}, which {size} ranks cannot share; choose a number of Macs "
                "that divides it, or parallelism Pipeline where the type has it"
            )
