"""Where a rank of the test begins: the only file here that writes the environment."""

import os
import sys
import threading
from collections.abc import Sequence

from machinery.clock import SystemClock
from nodeagent.fabric import orders
from nodeagent.fabric.orders import Word
from nodeagent.fabric.sweep import run

_EXIT_ORPHAN = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank; return its exit code."""
    order = orders.parse(arguments)
    os.environ.update(order.variables())
    threading.Thread(target=_die_with_parent, daemon=True).start()
    return run(order, _say, SystemClock())


def _say(word: Word) -> None:
    print(orders.spell(word), flush=True)  # noqa: T201 - the parent reads it


def _die_with_parent() -> None:
    """End when standard input does: it is a pipe whose other end nobody but the parent holds."""
    while os.read(0, 4096):
        continue
    os._exit(_EXIT_ORPHAN)


if __name__ == "__main__":
    sys.exit(main())
