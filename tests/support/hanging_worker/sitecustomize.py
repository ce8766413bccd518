"""Stops an engine's worker thread in a step, as a lost GPU command does: the event loop goes on and answers.

Python imports it at the start of every process that has this folder in PYTHONPATH. The file that TEST_HANG_FILE names
holds the seconds for which the next steps pause; without the file, steps run as ever.
"""

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_HANG = Path(os.environ.get("TEST_HANG_FILE", "/nonexistent"))


def _is_step(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name == "_plan" and code.co_filename.endswith("engine/batch/loop.py")


def _on_call(frame: FrameType, event: str, _: Any) -> None:
    if threading.current_thread().name != "mlx":
        sys.setprofile(None)
    elif event == "call" and _is_step(frame) and _HANG.exists():
        threading.Event().wait(float(_HANG.read_text()))


threading.setprofile(_on_call)
