"""Cost of a piece of work: time, our process's CPU and etcd's CPU, all in seconds."""

import resource
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

import psutil

from bench.store.client import Client


class Meter:
    """Measures its `with` block. etcd's CPU comes in steps of 10 ms on Linux."""

    def __init__(self, etcd: psutil.Process) -> None:
        self._etcd = etcd
        self._before = (0.0, 0.0, 0.0)
        self.elapsed_s = self.python_s = self.etcd_s = 0.0

    def _now(self) -> tuple[float, float, float]:
        ours = resource.getrusage(resource.RUSAGE_SELF)
        theirs = self._etcd.cpu_times()
        return (time.perf_counter(), ours.ru_utime + ours.ru_stime, theirs.user + theirs.system)

    def __enter__(self) -> "Meter":
        self._before = self._now()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        spent = [after - before for after, before in zip(self._now(), self._before, strict=True)]
        self.elapsed_s, self.python_s, self.etcd_s = spent


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Input of a workload."""

    client: Client
    connect: Callable[[], Awaitable[Client]]
    etcd: psutil.Process
    folder: str
    """Prefix of the keys that this client may write."""

    def meter(self) -> Meter:
        return Meter(self.etcd)


def connections() -> int:
    """Return how many connections this process has to others."""
    pconns = psutil.Process().net_connections("tcp")
    return sum(1 for pconn in pconns if pconn.status == psutil.CONN_ESTABLISHED)
