"""Has MLX connect the ranks of a group. In the worker's thread; imports mlx.

`mx.distributed.init` holds Python's lock while it waits, so no other thread of this process runs until all ranks have
come: nothing answers, and nothing of ours could break it off. Hence ranks meet on our own channels first
(ranks/meeting.py), and a timer of the kernel ends the process if MLX waits on. Ring: rank 0 would wait for ever for a rank
that died on its way, and the others for 31 s (measured, mlx 0.32.4).
"""

import logging
import signal
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from nodeagent.engine.config import GroupConfig
from nodeagent.engine.ranks.errors import GroupError

# Beyond the 31 s after which MLX's ring gives up by itself, and says why.
_CONNECT_S = 40.0
# The last rank connects before it accepts, all others accept before they connect. If the first does not listen yet, MLX
# looks again after a second.
_HEAD_START_S = 0.15

log = logging.getLogger(__name__)


def connect(group: GroupConfig, pause: Callable[[float], object]) -> Any:
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
