"""Entry point of the engine: `python -m engine`. The only file here that reads or writes the environment."""

import os
import sys
from collections.abc import Sequence

from engine.process import run
from schemas.wire.engine_flags import GROUP_KEY_VARIABLE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one engine; return its exit code."""
    # A model is a local folder. Without these, transformers asks the hub about some models.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    return run(arguments, secret=os.environ.get(GROUP_KEY_VARIABLE, ""))


if __name__ == "__main__":
    sys.exit(main())
