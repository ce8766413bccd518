"""Times in which engines start and load models: as measured on each Mac, else computed from its disk."""

from collections.abc import Mapping
from typing import Final

from schemas.replica import Replica

# An engine imports MLX and compiles its first kernels besides reading the weights.
_START_S: Final = 4.0
# Until a disk is measured; the slowest internal disk of an Apple silicon Mac reads more.
_UNMEASURED_GBPS: Final = 1.0
# Far more than a fleet has; each takes about 200 bytes.
_MAX_LOAD_TIMES = 10_000


class LoadTimes:
    """The seconds in which models last loaded, by folder and node: the leader's memory, from the endpoints of agents."""

    def __init__(self) -> None:
        self._by_folder: dict[str, dict[str, float]] = {}

    def note(self, replica: Replica, seconds: float) -> None:
        """Note the load of a replica that serves; 0 s says nothing."""
        folder, node = replica.spec.model.folder, replica.spec.ranks[0].node
        if seconds <= 0 or len(replica.spec.ranks) > 1:
            return
        if folder not in self._by_folder and len(self._by_folder) >= _MAX_LOAD_TIMES:
            self._by_folder.clear()
        self._by_folder.setdefault(folder, {})[node] = seconds

    def of(self, folder: str) -> Mapping[str, float]:
        """Return the seconds of a model by node."""
        return self._by_folder.get(folder, {})


def load_s(weights_bytes: int, disk_gbps: float, last_s: float = 0.0) -> float:
    """Return the seconds in which an engine starts and loads its model.

    As long as the last time on this Mac (`last_s`, 0: not known), else by the disk; one of 0 GB/s was not measured.
    """
    return last_s or _START_S + weights_bytes / 1e9 / (disk_gbps or _UNMEASURED_GBPS)
