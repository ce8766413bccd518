"""A watchdog that ends Python code in another thread when it takes too long.

A chat template is a program that comes with a model's files. It may pass the check at the start and still loop for some
messages; neither Jinja nor Python can interrupt it otherwise. Code in C is ended when it returns to Python.
"""

import ctypes
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TICK_S = 0.5


class OverdueError(Exception):
    """Raised in a watched block that has taken too long."""


class Watchdog:
    """Watches blocks of code, at most one in each thread.

    Its own thread starts with the first block, and wakes only while there are any. A block costs some microseconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ticks: dict[int, int] = {}
        """The ticks that are left, by the identifier of the thread."""
        self._is_watching = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, limit_s: float) -> Iterator[None]:
        """Raise OverdueError in the block when it has taken this time, or a tick more."""
        thread_id = threading.get_ident()
        with self._lock:
            self._ticks[thread_id] = math.ceil(limit_s / _TICK_S) + 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
                self._thread.start()
            self._is_watching.set()
        try:
            yield
        finally:
            with self._lock:
                self._ticks.pop(thread_id, None)
                # An error that is not raised yet must not meet the code behind the block.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), None)

    def _watch(self) -> None:
        pause = threading.Event()
        while self._is_watching.wait():
            pause.wait(_TICK_S)
            with self._lock:
                self._ticks = {thread_id: left - 1 for thread_id, left in self._ticks.items()}
                for thread_id in [one for one, left in self._ticks.items() if left <= 0]:
                    del self._ticks[thread_id]
                    error = ctypes.py_object(OverdueError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), error)
                if not self._ticks:
                    self._is_watching.clear()
