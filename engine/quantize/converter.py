"""The conversion: mlx-lm's own converter, watched by a thread that ends the process at its limits."""

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import mlx.core as mx
from mlx_lm.convert import convert

from engine.quantize import quality
from machinery.clock import SystemClock
from machinery.process_secrets import disable_core_dumps
from models.quantization import QUALITY_FILE
from schemas.wire.exit_codes import ExitCode
from schemas.wire.stored_models import QuantizationQuality, QuantizationScheme

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


def measure(source: Path, into: Path, memory_bytes: int) -> None:
    """Write beside the result how near it is to the original, or why that is not known.

    Raises:
        OSError: the disk failed.

    """
    gc.collect()  # the converter's model
    try:
        measured = quality.measure(source, into, memory_bytes, SystemClock())
    except _MODEL_ERRORS as error:
        measured = QuantizationQuality(not_measured=_text(error))
    (into / QUALITY_FILE).write_text(
        measured.model_dump_json(indent=1, by_alias=True, exclude_none=True) + "\n"
    )


def _watchdog(parent: int, limits: list[int]) -> None:
    """Kill the process if it must not continue. Runs in a thread of its own, which mlx does not block.

    The last of `limits` are the bytes that mlx may take now.
    """
    never = threading.Event()
    for _ in range(round(_MOST_S / _TICK_S)):
        if os.getppid() != parent:
            _kill_self("its parent has ended")
        if mx.get_active_memory() > limits[-1]:
            _kill_self(f"it took more than {limits[-1] >> 20} MiB of memory")
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
    source, into, scheme, memory, available, parent = arguments
    # Freed buffers go back to the system, so that the limit counts what is used.
    mx.set_cache_limit(0)
    limits = [int(memory)]
    threading.Thread(target=_watchdog, args=(int(parent), limits), daemon=True).start()
    try:
        quantize(Path(source), Path(into), QuantizationScheme.model_validate_json(scheme))
        limits.append(int(available))
        measure(Path(source), Path(into), int(available))
    except _MODEL_ERRORS as error:
        sys.stderr.write(f"\n{_text(error)}\n")
        return ExitCode.UNUSABLE
    return ExitCode.OK


def _text(error: Exception) -> str:
    return " ".join(str(error).split())[:_ERROR_CHARACTERS] or type(error).__name__
