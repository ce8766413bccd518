"""Where the engine is in its life, and the numbers it shows while there. Decides nothing."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The words of `/health`; only `Ready` takes requests."""

    LOADING = "Loading"
    READY = "Ready"
    DRAINING = "Draining"
    FAILED = "Failed"


@dataclass(slots=True)
class Gauges:
    """Written by the worker thread alone and read by the event loop: single words, so no lock.

    `steps` is what tells a slow model from a stuck one: a live process with an idle event loop
    proves nothing about the thread that owns the GPU.
    """

    loaded_bytes: int = 0
    total_bytes: int = 0
    steps: int = 0
    active_bytes: int = 0
    peak_bytes: int = 0
