"""`python -m engine.quantize SOURCE INTO SCHEME MEMORY_BYTES AVAILABLE_BYTES PARENT`: quantizes a model with mlx-lm's converter.

SCHEME is a `QuantizationScheme` in JSON. It writes the folder INTO, which must not exist, and runs no code of the model. It ends by itself if the process PARENT
ends, if it takes too long, or if mlx takes more than MEMORY_BYTES,
and AVAILABLE_BYTES while it compares the result with the original. The last line on stderr says why it failed.
"""

import os
import sys

if __name__ == "__main__":
    # Before the import of huggingface_hub, which reads them once: a model is a folder, and no hub is asked.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    from engine.quantize import converter

    sys.exit(converter.run(sys.argv[1:]))
