"""The read rate of the disk that holds models: measured once, when a model has experts that memory cannot hold."""

import asyncio
import fcntl
import logging
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from machinery.clock import Clock
from schemas.node import NodeStatus

log = logging.getLogger(__name__)

# About an expert of one layer: what a token would wait for, one after another.
_BLOCK_BYTES: Final = 4 << 20
_BLOCKS, _LEAST_BLOCKS = 64, 16
_WRITE_LIMIT_S: Final = 4.0
# A measurement is no reason to fill a disk.
_FREE_FACTOR: Final = 8


class DiskRate:
    """Fills the rate into a node's status. The status in the store keeps it for later runs, until the disk is another."""

    def __init__(self, models_dir: Path, clock: Clock) -> None:
        self._models_dir = models_dir
        self._clock = clock
        self._has_tried = False
        self._read_gbps = 0.0

    async def fill(self, status: NodeStatus, before: NodeStatus | None) -> NodeStatus:
        """Return the status with the rate, which is measured if a model needs it; `before` is the one in the store."""
        if not self._read_gbps and before is not None and before.disk_bytes == status.disk_bytes:
            self._read_gbps = before.disk_read_gbps
        if not self._read_gbps and not self._has_tried and needs_rate(status):
            self._has_tried = True
            try:
                self._read_gbps = await asyncio.to_thread(self._measure)
            except OSError as error:
                log.info("the disk's read rate was not measured", extra={"why": str(error)})
        return status.model_copy(update={"disk_read_gbps": self._read_gbps})

    def _measure(self) -> float:
        if shutil.disk_usage(self._models_dir).free < _FREE_FACTOR * _BLOCKS * _BLOCK_BYTES:
            return 0.0
        return round(measure_read_gbps(self._models_dir, self._clock), 2)


def needs_rate(status: NodeStatus) -> bool:
    """Return whether a model of the node has experts, and weights beyond the memory for models."""
    geometries = (report.geometry for report in status.models if report.geometry is not None)
    return any(
        geometry.expert_bytes > 0 and geometry.weights_bytes > status.allocatable_bytes > 0
        for geometry in geometries
    )


def measure_read_gbps(folder: Path, clock: Clock) -> float:
    """Return the rate in GB/s of reads of blocks in random order, past the cache; 0 if the disk is too slow to tell.

    Writes 256 MiB at most, into a file without a name. Raises OSError.
    """
    block = bytearray(_BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        handle = file.fileno()
        if sys.platform == "darwin":  # what is written past the cache is read from the disk
            fcntl.fcntl(handle, fcntl.F_NOCACHE, 1)
        began, count = clock.monotonic(), 0
        while count < _BLOCKS and clock.monotonic() - began < _WRITE_LIMIT_S:
            file.write(os.urandom(_BLOCK_BYTES))
            count += 1
        os.fsync(handle)
        if count < _LEAST_BLOCKS:
            return 0.0
        if sys.platform == "linux":
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        order = random.Random(0).sample(range(count), count)
        start = clock.monotonic()
        for index in order:
            os.preadv(handle, [block], index * _BLOCK_BYTES)
        took_s = clock.monotonic() - start
    return count * _BLOCK_BYTES / max(took_s, 1e-9) / 1e9
