"""Has MLX connect the ranks of a group. In the worker's thread; imports mlx.

`mx.distributed.init` holds Python's lock while it waits, so no other thread of this process runs until all ranks have
come: nothing answers, and nothing of ours could break it off. Hence ranks meet on our own channels first
(ranks/meeting.py), and a timer of the kernel ends the process if MLX waits on. Ring: rank 0 would wait for ever for a rank
that died on its way, and the others for 31 s (measured, mlx 0.32.4).

Keeps one rank's part of a model: the seam for replicas of several Macs. In the worker's thread alone.

As `mlx_lm.utils.sharded_load` does it, on a model whose weights are lazy: what belongs to other ranks is never read.
Nothing is sent here, and nobody is waited for.
"""

import inspect
import logging
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.config import GroupConfig
from engine.errors import GroupError
from schemas.shardgroup import Parallelism

# Beyond the 31 s after which MLX's ring gives up by itself, and says why.
_CONNECT_S = 40.0
# The last rank connects before it accepts, all others accept before they connect. If the first does not listen yet, MLX
# looks again after a second.
_HEAD_START_S = 0.15

log = logging.getLogger(__name__)


def init_group(group: GroupConfig, pause: Callable[[float], object]) -> Any:
    """Return the group (an mx.distributed.Group), as the environment says where its ranks are.

    Raises:
        GroupError: MLX cannot connect them.

    """
    if group.backend == "ring" and group.rank == group.world_size - 1:
        pause(_HEAD_START_S)
    log.info(
        "connecting; SIGALRM ends this process if it takes longer",
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
            f"MLX takes this for rank {found.rank()} of {found.size()}, and it is rank {group.rank} of "
            f"{group.world_size}: look at MLX_RANK and MLX_HOSTFILE or MLX_IBV_DEVICES"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSplit:
    """How a model is split."""

    group: Any
    """An mx.distributed.Group: the ranks that share it."""
    parallelism: Parallelism = "Tensor"
    layers: tuple[int, ...] = ()
    """How many layers each rank has, in rank order; rank 0 has the last ones. () leaves it to mlx-lm."""


def split_model(model: Any, how: ModelSplit) -> None:
    """Leave in the model what this rank of the group computes.

    Each rank needs all weight files on its disk. To be done before caches are made, and before the weights are read.

    Raises:
        ValueError: the type cannot be split like that, or its sizes cannot be divided by the group's.

    """
    by_layers = getattr(getattr(model, "model", None), "pipeline", None)
    ways = ["Tensor"] * hasattr(model, "shard") + ["Pipeline"] * (by_layers is not None)
    if how.parallelism not in ways:
        instead = f"parallelism {ways[0]} works" if ways else "give it one Mac that has room for it"
        raise ValueError(
            f"model type {getattr(model, 'model_type', '')} cannot be split over {how.group.size()} Macs by "
            f"{how.parallelism} in mlx-lm; {instead}"
        )
    if by_layers is not None and how.parallelism == "Pipeline":
        _pipeline(model, by_layers, how)
        return
    before = dict(_heads(model))
    model.shard(how.group)
    _check_heads(before, dict(_heads(model)), how.group.size())


def _pipeline(model: Any, by_layers: Any, how: ModelSplit) -> None:
    count, size = len(model.layers), how.group.size()
    takes_split = "split" in inspect.signature(by_layers).parameters
    if how.layers and (len(how.layers) != size or sum(how.layers) != count):
        raise ValueError(
            f"the split {','.join(map(str, how.layers))} does not give each of {size} ranks its part of {count} layers"
        )
    if how.layers and takes_split:
        by_layers(how.group, split=list(how.layers))
        return
    by_layers(how.group)
    own = len([layer for layer in model.layers if layer is not None])
    if how.layers and own != how.layers[how.group.rank()]:
        raise ValueError(
            f"model type {model.model_type} splits its layers itself in mlx-lm: rank {how.group.rank()} gets "
            f"{own}, not {how.layers[how.group.rank()]}; leave --layers out"
        )


def _heads(model: Any) -> Iterator[tuple[tuple[int, str], int]]:
    """Yield the numbers of heads in each layer's modules, which types of mlx-lm divide without looking."""
    for at, layer in enumerate(model.layers):
        for name, module in layer.named_modules():
            for key, value in vars(module).items():
                if "heads" in key and type(value) is int:
                    yield (at, f"{name}.{key}"), value


def _check_heads(
    before: dict[tuple[int, str], int], after: dict[tuple[int, str], int], size: int
) -> None:
    """Refuse what mlx-lm would load, and fail with at the first token, or not even then."""
    for (at, name), heads in before.items():
        now = after.get((at, name), heads)
        # Some types repeat KV heads of which there are fewer than ranks.
        is_repeated = now == 1 and size % heads == 0
        if now not in (heads, heads / size) and not is_repeated:
            raise ValueError(
                f"{name} of layer {at} is {heads}, which {size} ranks cannot share; choose a number of Macs "
                "that divides it, or parallelism Pipeline where the type has it"
            )
