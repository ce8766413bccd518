"""How much memory this engine's process took at most. Knows nothing of models."""

import resource
import sys


def peak_bytes(mlx_bytes: int) -> int:
    """Return the larger of what MLX counted and what the process held.

    On Linux the process holds what MLX allocated, so it is the process' figure. On a Mac neither has all of it:
    memory of the GPU is no resident memory (omlx #3431), and MLX counts no Python; there it is a lower bound.
    A call costs a microsecond, and only `/health` makes it.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return max(mlx_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
