"""Real ranks of one model on this machine, connected by MLX's ring."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.engine.conftest import Engine, Start, eventually, free_port

READY_S = 90.0
SECRET = "of this epoch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the ranks of one start find each other."""

    size: int
    coordinator: str
    hostfile: Path

    @classmethod
    def of(cls, size: int, folder: Path) -> "Meeting":
        with ExitStack() as stack:
            import socket

            held = [
                stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(size + 1)
            ]
            ports = [int(one.getsockname()[1]) for one in held]
        hostfile = folder / f"hosts-{ports[0]}"
        hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[1:]]))
        return cls(size=size, coordinator=f"127.0.0.1:{ports[0]}", hostfile=hostfile)

    def rank(
        self,
        start: Start,
        model: Path,
        number: int,
        *,
        secret: str = SECRET,
        **flags: object,
    ) -> Engine:
        """Start one rank."""
        variables = {
            "MLX_FLEET_GROUP_SECRET": secret,
            "MLX_RANK": str(number),
            "MLX_HOSTFILE": str(self.hostfile),
        }
        given = {"rank": number, "world_size": self.size, "coordinator": self.coordinator} | flags
        return start(model, variables=variables, **given)


def form(start: Start, model: Path, folder: Path, size: int, **flags: object) -> list[Engine]:
    """Start all ranks of a group, and wait until it serves."""
    meeting = Meeting.of(size, folder)
    ranks = [meeting.rank(start, model, number, **flags) for number in range(size)]
    for rank in ranks:
        eventually(rank.is_ready, within_s=READY_S)
    return ranks


def states(ranks: Sequence[Engine]) -> list[str]:
    """Return what each rank's /health says."""
    return [rank.health().json["state"] for rank in ranks]
