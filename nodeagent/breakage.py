"""What engines left behind that only a restart of the machine mends. Keeps count; conditions.py says it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schemas.fabric import NodeFabric

# A port that comes back does so within seconds of the process' end.
_DOWN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Why the machine has to be restarted."""

    reason: str
    message: str


class Breakages:
    """What happened on one node. Times are in seconds of the agent's clock."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        """RDMA devices of ranks that did not end well, and since when."""

    def ended_badly(self, devices: Iterable[str], now: float) -> None:
        """Note that a rank with these RDMA devices had to be given up."""
        self._used.update(dict.fromkeys(devices, now))

    def look(self, fabric: NodeFabric | None, undying: Sequence[str], now: float) -> Broken | None:
        """Return what only a restart mends; `undying` are replicas whose engine was killed and lives on."""
        if undying:
            return Broken(
                reason="ProcessUndying",
                message=f"the engine of {', '.join(undying)} was killed and does not end: its driver holds it, and its "
                "memory. Restart this machine",
            )
        if fabric is None:
            return None
        down = sorted(set(_down_with_a_cable(fabric)) & self._used.keys())
        for name in self._used.keys() - set(down):
            if _is_active(fabric, name):
                del self._used[name]
        late = [name for name in down if now - self._used[name] >= _DOWN_S]
        if not late:
            return None
        return Broken(
            reason="RdmaDown",
            message=f"{', '.join(late)} stayed down after a rank had ended, and the Mac at the other end is there. Take "
            "the cable out and put it in again; if that does not help, restart this machine",
        )


def _down_with_a_cable(fabric: NodeFabric) -> Iterable[str]:
    """Yield the RDMA devices that are down though another Mac is at the cable's end."""
    cabled = {port.interface for port in fabric.ports if port.peer and port.interface}
    for device in fabric.rdma:
        if device.state == "Down" and device.interface in cabled:
            yield device.name


def _is_active(fabric: NodeFabric, name: str) -> bool:
    return any(device.name == name and device.state == "Active" for device in fabric.rdma)
