"""The device check: `python -m engine.device_check [FOLDER]` multiplies once on MLX's default device.

With a folder, it measures the memory bandwidth of a chip that is not listed, and keeps the result there. It prints one line of JSON (nodeagent/hardware/metal.py reads it). Where Metal cannot be used, MLX may abort the process
(mlx#3397), which is why it is a process of its own.
"""

import importlib.metadata
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from machinery.clock import SystemClock
from machinery.files import write_atomically
from machinery.mach_o import read_mach_o
from schemas import chips

_SIDE = 64
# The packages with libmlx: for macOS, and for Linux without a GPU.
_BACKENDS: Final = ("mlx-metal", "mlx-cpu")
# MLX compiles the kernels of the M5's neural accelerators only for this target or a later one (mlx PR 3622).
_NAX_SYSTEM: Final = (26, 2)
# Larger than the cache of any chip (96 MB), and 10 ms of a slow one.
_COPY_BYTES: Final = 256 << 20
_COPIES: Final = 8
_COPY_LIMIT_S: Final = 2.0
_COPY_FILE: Final = "memory-bandwidth.json"


def main() -> int:
    """Print the device, its memory, and whether its product of two matrices is right."""
    ones = mx.ones((_SIDE, _SIDE))
    total = mx.sum(ones @ ones).item()
    device = mx.default_device()
    has_metal = mx.metal.is_available()
    info = mx.device_info() if has_metal else {}
    gpu = describe_device(info) if has_metal else None
    if gpu is not None and sys.argv[1:]:
        gpu["copyGbps"] = copy_gbps(str(info.get("device_name", "")), Path(sys.argv[1]))
    result = {
        "device": str(info.get("device_name", device)),
        "isMetal": has_metal,
        "isRight": total == _SIDE**3,
        "mlxBuild": describe_build(Path(mx.__file__).parent),
        "metalDevice": gpu,
    }
    sys.stdout.write(f"{json.dumps(result)}\n")
    return 0


def describe_device(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the GPU's memory as `mx.device_info()` has it (schemas/node.py: MetalDevice)."""
    return {
        "architecture": str(info.get("architecture", "")),
        "memoryBytes": info.get("memory_size", 0),
        "recommendedBytes": info.get("max_recommended_working_set_size", 0),
        "maxBufferBytes": info.get("max_buffer_length", 0),
    }


def copy_gbps(chip: str, folder: Path) -> float:
    """Return the memory bandwidth of a chip in GB/s, measured once and kept in the folder; 0 for a listed chip."""
    if chips.find_chip(chip, gpu_cores=None, memory_bytes=None) is not None:
        return 0.0
    file = folder / _COPY_FILE
    # While engines run, a copy is slower: so it is measured before the first one, and not again.
    if (known := kept_gbps(chip, file)) is not None:
        return known
    measured = round(measure_copy(), 1)
    with suppress(OSError):  # measured again at the next start
        write_atomically(file, json.dumps({"chip": chip, "copyGbps": measured}))
    return measured


def kept_gbps(chip: str, file: Path) -> float | None:
    """Return what an earlier check has measured; None if the file has nothing of this chip."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        tree = json.loads(file.read_text())
        if tree["chip"] == chip and 0 < tree["copyGbps"] < float("inf"):
            return float(tree["copyGbps"])
    return None


def measure_copy() -> float:
    """Return the bandwidth of the best of some copies in GB/s; each byte is read and written. Takes 2 s at most.

    A copy reaches less than what Apple states for a chip, so a Mac with a new chip is rather ranked too low.
    """
    clock = SystemClock()
    source = mx.arange(_COPY_BYTES // 4, dtype=mx.float32)
    mx.eval(source)
    began, best_s = clock.monotonic(), float("inf")
    for _ in range(_COPIES):
        start = clock.monotonic()
        mx.eval(-source)
        end = clock.monotonic()
        best_s = min(best_s, end - start)
        if end - began + (end - start) > _COPY_LIMIT_S:
            break
    return 2 * _COPY_BYTES / best_s / 1e9


def describe_build(package: Path) -> dict[str, Any]:
    """Return the build of MLX in this folder: the wheels of one release differ in what they contain (schemas/node.py)."""
    system = (0, 0)
    library = package / "lib" / "libmlx.dylib"
    # Unknown on Linux, and of a build of one's own that has several architectures.
    with suppress(OSError, ValueError), library.open("rb") as file:
        system = read_mach_o(file).minimum_system
    return {
        "tag": next(filter(None, map(wheel_tag, _BACKENDS)), ""),
        "minimumSystem": "{}.{}".format(*system) if system > (0, 0) else "",
        "hasJaccl": mx.distributed.is_available("jaccl"),
        "hasNax": system >= _NAX_SYSTEM,
    }


def wheel_tag(distribution: str) -> str:
    """Return the platform of the wheel that a package was installed from; "" if there was none."""
    try:
        text = importlib.metadata.distribution(distribution).read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return ""
    lines = [line.removeprefix("Tag: ") for line in text.splitlines() if line.startswith("Tag: ")]
    return lines[0].rpartition("-")[2].strip() if lines else ""


if __name__ == "__main__":
    sys.exit(main())
