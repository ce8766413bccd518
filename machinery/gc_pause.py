"""Pauses of Python's cyclic garbage collector while many long-lived objects are created.

While fifty thousand objects are decoded, the collector traverses all of them again and again: measured, two thirds of
the time, and pauses of a third of a second.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collection() -> Iterator[None]:
    """Disable the collector in a block that creates many objects; the block must not await."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_survivors() -> None:
    """Exclude all objects that exist now from later collections.

    Reference counting still frees them; only cycles among them are not found.
    """
    gc.freeze()
