"""The read rate of the disk that holds models: measured once, when a model has experts that memory cannot hold."""

import asyncio
import fcntl
import logging
import os
import random
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import BaseModel, Field, ValidationError

from machinery.clock import Clock
from machinery.files import write_atomically
from schemas.node import NodeStatus

log = logging.getLogger(__name__)

_FILE: Final = "disk-rate.json"
_MAX_FILE_BYTES: Final = 4096
# About an expert of one layer: what a token would wait for, one after another.
_BLOCK_BYTES: Final = 4 << 20
_BLOCKS, _LEAST_BLOCKS = 64, 16
_WRITE_LIMIT_S: Final = 4.0
# A measurement is no reason to fill a disk.
_FREE_FACTOR: Final = 8


class _Kept(BaseModel):
    """A measurement, with the disk that it is of."""

    models_dir: str
    total_bytes: int
    read_gbps: float = Field(gt=0, lt=1000)


class DiskRate:
    """Fills the rate into a node's status. It is kept in the state folder, and measured again for another disk."""

    def __init__(self, models_dir: Path, state_dir: Path, clock: Clock) -> None:
        self._models_dir = models_dir
        self._file = state_dir / _FILE
        self._clock = clock
        self._has_tried = False
        self._read_gbps: float | None = None
        """None until the file of an earlier run was read."""

    async def fill(self, status: NodeStatus) -> NodeStatus:
        """Return the status with the rate, which is measured if one of its models needs it."""
        if self._read_gbps is None:
            self._read_gbps = await asyncio.to_thread(self._read_kept)
        if not self._read_gbps and not self._has_tried and needs_rate(status):
            self._has_tried = True
            self._read_gbps = await asyncio.to_thread(self._measure)
        return status.model_copy(update={"disk_read_gbps": self._read_gbps})

    def _read_kept(self) -> float:
        with suppress(OSError, ValidationError):
            with self._file.open("rb") as file:
                kept = _Kept.model_validate_json(file.read(_MAX_FILE_BYTES))
            size = shutil.disk_usage(self._models_dir).total
            if (kept.models_dir, kept.total_bytes) == (str(self._models_dir), size):
                return kept.read_gbps
        return 0.0

    def _measure(self) -> float:
        """Return the rate and keep it; 0 if it cannot be measured."""
        try:
            usage = shutil.disk_usage(self._models_dir)
            if usage.free < _FREE_FACTOR * _BLOCKS * _BLOCK_BYTES:
                return 0.0
            rate = round(measure_read_gbps(self._models_dir, self._clock), 2)
            if not rate:
                return 0.0
            kept = _Kept(models_dir=str(self._models_dir), total_bytes=usage.total, read_gbps=rate)
            write_atomically(self._file, kept.model_dump_json())
        except (OSError, ValidationError) as error:
            log.info("the disk's read rate was not measured", extra={"why": str(error)})
            return 0.0
        return rate


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
        if hasattr(
            fcntl, "F_NOCACHE"
        ):  # macOS; what is written past the cache is read from the disk
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
