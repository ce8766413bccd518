"""Entry point of the engine: `python -m engine`. The only file here that reads or writes the environment."""

import os
import sys
from collections.abc import Sequence

from engine import config
from engine.process import run
from machinery import log_flags
from machinery.process_secrets import disable_core_dumps


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one engine; return its exit code."""
    disable_core_dumps()
    # A model is a local folder. Without these, transformers asks the hub about some models.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    level = log_flags.parse_level(os.environ.get(log_flags.LEVEL_VARIABLE, ""))
    return run(config.read(sys.argv[1:] if arguments is None else arguments), log_level=level)


if __name__ == "__main__":
    sys.exit(main())
