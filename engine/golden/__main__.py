"""Where the process begins that answers alone: the only file here that writes the environment."""

import os
import sys

from engine.golden.asking import run

if __name__ == "__main__":
    # A model is a folder; transformers would ask the hub about some of them otherwise.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    sys.exit(run(sys.argv[1:]))
