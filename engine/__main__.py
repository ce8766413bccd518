"""Where the engine's process begins: the only file here that reads or writes the environment."""

import os
import sys
from collections.abc import Sequence

from engine.process import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one engine; return its exit code."""
    # A model is a folder; transformers would ask the hub about some of them otherwise.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    return run(arguments, secret=os.environ.get("MLX_FLEET_GROUP_SECRET", ""))


if __name__ == "__main__":
    sys.exit(main())
