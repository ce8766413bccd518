"""The conversion: mlx-lm's own converter, watched by a thread that ends the process at its limits."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import mlx.core as mx
from mlx_lm.convert import convert

from machinery.process_secrets import disable_core_dumps
from schemas.wire.exit_codes import ExitCode
from schemas.wire.stored_models import QuantizationScheme

# A model of 700 GB is read from an SSD within minutes, and computed within an hour.
_MOST_S: Final = 6 * 3600
_TICK_S: Final = 0.1
# Engines that serve on this Mac go first.
_NICENESS: Final = 10
_ERROR_CHARACTERS: Final = 300
# The errors of mlx-lm for a model that it cannot build, and for a disk that is full.
_MODEL_ERRORS: Final = (
    *(ValueError, TypeError, AssertionError, AttributeError, LookupError, ArithmeticError),
    *(RuntimeError, OSError, ImportError),
)


def quantize(source: Path, into: Path, scheme: QuantizationScheme) -> None:
    """Write the quantized model. Its model card says what mlx-lm did; nothing is uploaded.

    Raises:
        ValueError: mlx-lm cannot convert the model; other errors mean the same, or a disk that failed.

    """
    convert(
        str(source),
        mlx_path=str(into),
        quantize=True,
        q_mode=scheme.mode,
        q_bits=scheme.bits,
        q_group_size=scheme.group_size,
        quant_predicate=scheme.quant_predicate,
        trust_remote_code=False,
    )


def _watchdog(parent: int, memory_bytes: int) -> None:
    """Kill the process if it must not continue. Runs in a thread of its own, which mlx does not block."""
    never = threading.Event()
    for _ in range(round(_MOST_S / _TICK_S)):
        if os.getppid() != parent:
            _kill_self("its parent has ended")
        if mx.get_active_memory() > memory_bytes:
            _kill_self(f"it took more than {memory_bytes >> 20} MiB of memory")
        never.wait(_TICK_S)
    _kill_self(f"the conversion did not finish within {_MOST_S} s")


def _kill_self(reason: str) -> None:
    sys.stderr.write(f"\n{reason}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def run(arguments: Sequence[str]) -> int:
    """Convert the model that the command line names; return the exit code."""
    disable_core_dumps()
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    source, into, scheme, memory, parent = arguments
    # Freed buffers go back to the system, so that the limit counts what is used.
    mx.set_cache_limit(0)
    threading.Thread(target=_watchdog, args=(int(parent), int(memory)), daemon=True).start()
    try:
        quantize(Path(source), Path(into), QuantizationScheme.model_validate_json(scheme))
    except _MODEL_ERRORS as error:
        text = " ".join(str(error).split())[:_ERROR_CHARACTERS] or type(error).__name__
        sys.stderr.write(f"\n{text}\n")
        return ExitCode.UNUSABLE
    return ExitCode.OK
