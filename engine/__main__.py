"""Entry point of the engine: `python -m engine`. The only file here that reads or writes the environment."""

import os
import sys
from collections.abc import Sequence

from engine.process import run
from machinery import log_flags
from machinery.process_secrets import disable_core_dumps
from schemas.wire.engine_flags import MAX_SECRET_BYTES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one engine; return its exit code."""
    disable_core_dumps()
    # A model is a local folder. Without these, transformers asks the hub about some models.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    level = log_flags.parse_level(os.environ.get(log_flags.LEVEL_VARIABLE, ""))
    return run(arguments, read_secret=_read_secret, log_level=level)


def _read_secret() -> str:
    """Return the secret on stdin, up to its end; "" if there is none."""
    return sys.stdin.buffer.read(MAX_SECRET_BYTES).decode(errors="replace").strip()


if __name__ == "__main__":
    sys.exit(main())
