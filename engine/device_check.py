"""The device check: `python -m engine.device_check` multiplies once on MLX's default device.

It prints one line of JSON (nodeagent/hardware/metal.py reads it). Where Metal cannot be used, MLX may abort the process
(mlx#3397), which is why it is a process of its own.
"""

import json
import sys

import mlx.core as mx

_SIDE = 64


def main() -> int:
    """Print the device, and whether its product of two matrices is right."""
    ones = mx.ones((_SIDE, _SIDE))
    total = mx.sum(ones @ ones).item()
    device = mx.default_device()
    has_metal = mx.metal.is_available()
    info = mx.device_info() if has_metal else {}
    found = {
        "device": str(info.get("device_name", device)),
        "isMetal": has_metal,
        "isRight": total == _SIDE**3,
    }
    sys.stdout.write(f"{json.dumps(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
