"""One rank of a fabric test: connects, sums arrays of each size with the other ranks, and prints measurements.

Its deadlines use SIGALRM with the default action: while MLX connects it holds the interpreter's lock, so no Python
code runs, and rank 0 would wait forever. The kernel ends the process all the same. Only this module imports mlx in
this package, and only it writes the environment.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from machinery.clock import Clock, SystemClock
from machinery.process_secrets import disable_core_dumps
from nodeagent.fabric import rank_process
from nodeagent.fabric.rank_process import (
    FabricRankOrder,
    RankBroken,
    RankMessage,
    RanksConnected,
    SumRound,
)
from schemas.fabrictest import CONNECT_TIMEOUT_S, ROUND_TIMEOUT_S

_FLOAT_BYTES = 4
# Sums stay below 2^24, up to which float32 holds every whole number: any order of addition gives the same sum.
_VALUE_PERIOD = 251
_SHIFT_PERIOD = 97


def run_sweep(order: FabricRankOrder, send: Callable[[RankMessage], None], clock: Clock) -> int:
    """Measure all sizes; return the exit code: 0 if done, 1 if MLX failed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(CONNECT_TIMEOUT_S)
    try:
        for message in _measure(order, clock):
            send(message)
            signal.alarm(ROUND_TIMEOUT_S)
    except (RuntimeError, ValueError, MemoryError) as error:
        send(RankBroken(why=" ".join(str(error).split()) or type(error).__name__))
        return 1
    finally:
        signal.alarm(0)
    return 0


def _measure(order: FabricRankOrder, clock: Clock) -> Iterator[RankMessage]:
    import mlx.core as mx  # noqa: PLC0415 - reads the variables that __main__ sets

    # On the CPU: the links are measured, not the transfer to and from the GPU.
    mx.set_default_device(mx.cpu)
    backend = "ring" if order.backend == "ring" else "jaccl"
    group = mx.distributed.init(strict=True, backend=backend)
    if (group.rank(), group.size()) != (order.rank, order.size):
        raise RuntimeError(f"MLX assigned this process rank {group.rank()} of {group.size()}")
    yield RanksConnected()
    for size in order.sizes:
        base = mx.arange(size // _FLOAT_BYTES, dtype=mx.int32) % _VALUE_PERIOD
        base = base.astype(mx.float32)
        together = base * order.size + order.size * (order.size - 1) // 2
        mx.eval(base, together)
        # The first round is not counted: it allocates buffers and touches pages.
        for number in range(order.rounds + 1):
            shift = number % _SHIFT_PERIOD
            mine = base + (order.rank + shift)
            # A barrier: no rank measures while another one checks its last sum.
            mx.eval(mine, mx.distributed.all_sum(mx.ones(1), group=group))
            began = clock.monotonic()
            got = mx.distributed.all_sum(mine, group=group)
            mx.eval(got)
            took_s = clock.monotonic() - began
            is_right = bool(mx.array_equal(got, together + order.size * shift).item())
            if number > 0 or not is_right:
                yield SumRound(size=size, took_us=round(took_s * 1e6, 1), is_right=is_right)
    # A barrier: a rank that ends first must not break its connections to the others.
    mx.eval(mx.distributed.all_sum(mx.ones(1), group=group))


_EXIT_ORPHANED = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank; return its exit code."""
    disable_core_dumps()
    order = rank_process.parse_order(arguments)
    os.environ.update(order.variables())
    threading.Thread(target=_die_with_parent, daemon=True).start()
    return run_sweep(order, _print_message, SystemClock())


def _print_message(message: RankMessage) -> None:
    print(rank_process.encode_message(message), flush=True)  # noqa: T201 - the parent reads it


def _die_with_parent() -> None:
    """Exit when standard input ends: it is a pipe whose other end only the parent holds."""
    while os.read(0, 4096):
        continue
    os._exit(_EXIT_ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
