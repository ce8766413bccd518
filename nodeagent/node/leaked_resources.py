"""Resources that engines left behind and only a restart of the machine frees: RDMA devices, and processes that do not end."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from nodeagent.hardware.rdma_failures import KnownFailure, find_failure
from schemas.node import NodeFabric

# A healthy port comes back within seconds after the end of the process.
_PORT_DOWN_S = 60.0
# One failure may be that of a Mac at the other end which is just being restarted.
_FAILED_EPOCHS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RebootReason:
    """The reason why the machine must be restarted."""

    reason: str
    message: str


class LeakedResources:
    """Resources that engines left behind and only a restart frees; times are seconds of the agent's monotonic clock."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        """RDMA devices of ranks that were given up, and since when."""
        self._ends: dict[str, tuple[int, KnownFailure, int]] = {}
        """The last epoch of each replica that ended by a failure which a restart mends, and how many did so in a row."""

    def record_devices(self, devices: Iterable[str], now: float) -> None:
        """Record that a rank with these RDMA devices was given up."""
        self._used.update(dict.fromkeys(devices, now))

    def record_end(self, replica: str, epoch: int, words: str) -> None:
        """Record the last words of a rank that used RDMA."""
        failure = find_failure(words)
        last_epoch, before, count = self._ends.pop(replica, (0, None, 0))
        if failure is None or failure.restart == "Never":
            return
        if epoch != last_epoch:
            count = count + 1 if before is failure else 1
        self._ends[replica] = epoch, failure, count

    def record_ready(self, replica: str) -> None:
        """Record that a rank connected: what failed before works again."""
        self._ends.pop(replica, None)

    def _exhausted(self, fabric: NodeFabric | None) -> RebootReason | None:
        """Return the reason for a restart if RDMA failed in two epochs in a row."""
        for replica, (_, failure, count) in self._ends.items():
            is_mended = failure.restart == "Always" or _is_linked(fabric)
            if count >= _FAILED_EPOCHS and is_mended:
                return RebootReason(
                    reason="RdmaExhausted",
                    message=f"ranks of {replica} failed with {failure.name} in {count} epochs in a row: {failure.cause}. "
                    "Another attempt cannot help: `fleetctl node reboot NAME --drain`",
                )
        return None

    def find(
        self, fabric: NodeFabric | None, unkillable: Sequence[str], now: float
    ) -> RebootReason | None:
        """Return the reason for a restart; `unkillable` are replicas whose engine survives SIGKILL."""
        if unkillable:
            return RebootReason(
                reason="ProcessUndying",
                message=f"the engine of {', '.join(unkillable)} was killed and does not end: its driver holds it, and its "
                "memory. Restart this machine",
            )
        exhausted = self._exhausted(fabric)
        if exhausted is not None or fabric is None:
            return exhausted
        down = sorted(set(_down_devices_with_peer(fabric)) & self._used.keys())
        for name in self._used.keys() - set(down):
            if _is_active(fabric, name):
                del self._used[name]
        late = [name for name in down if now - self._used[name] >= _PORT_DOWN_S]
        if not late:
            return None
        return RebootReason(
            reason="RdmaDown",
            message=f"{', '.join(late)} stayed down after a rank had ended, though the Mac at the other end is connected. "
            "Unplug the cable and plug it in again; if that does not help, `fleetctl node reboot NAME --drain`",
        )


def _down_devices_with_peer(fabric: NodeFabric) -> Iterable[str]:
    """Yield the RDMA devices that are down although a Mac is connected to the other end of the cable."""
    cabled = {port.interface for port in fabric.ports if port.peer and port.interface}
    for device in fabric.rdma:
        if device.state == "Down" and device.interface in cabled:
            yield device.name


def _is_linked(fabric: NodeFabric | None) -> bool:
    """Return whether RDMA should work: a cable leads to a Mac, and each such port has an IPv4 address."""
    if fabric is None:
        return False
    addressed = {interface.name for interface in fabric.interfaces if interface.address}
    active = [device.interface for device in fabric.rdma if device.state == "Active"]
    return bool(active) and addressed.issuperset(active)


def _is_active(fabric: NodeFabric, name: str) -> bool:
    return any(device.name == name and device.state == "Active" for device in fabric.rdma)
