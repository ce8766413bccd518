"""The device check: `python -m engine.device_check` multiplies once on MLX's default device.

It prints one line of JSON (nodeagent/hardware/metal.py reads it). Where Metal cannot be used, MLX may abort the process
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

from machinery.mach_o import read_mach_o

_SIDE = 64
# The packages with libmlx: for macOS, and for Linux without a GPU.
_BACKENDS: Final = ("mlx-metal", "mlx-cpu")
# MLX compiles the kernels of the M5's neural accelerators only for this target or a later one (mlx PR 3622).
_NAX_SYSTEM: Final = (26, 2)


def main() -> int:
    """Print the device, its memory, and whether its product of two matrices is right."""
    ones = mx.ones((_SIDE, _SIDE))
    total = mx.sum(ones @ ones).item()
    device = mx.default_device()
    has_metal = mx.metal.is_available()
    info = mx.device_info() if has_metal else {}
    result = {
        "device": str(info.get("device_name", device)),
        "isMetal": has_metal,
        "isRight": total == _SIDE**3,
        "mlxBuild": describe_build(Path(mx.__file__).parent),
        "metalDevice": describe_device(info) if has_metal else None,
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
