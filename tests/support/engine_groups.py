"""Real ranks of one model on this machine, connected by MLX's ring."""

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.support.engine_process import Engine, Start, eventually
from tests.support.ports import free_port

READY_S = 120.0
SECRET = "of this epoch"
NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The address and settings of one start of a group."""

    size: int
    port: int
    """The port on which rank 0 listens to the others."""
    hostfile: Path

    @classmethod
    def of(cls, size: int, folder: Path) -> "Meeting":
        ports = [free_port() for _ in range(size + 1)]
        hostfile = folder / f"hosts-{ports[0]}"
        hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[1:]]))
        return cls(size=size, port=ports[0], hostfile=hostfile)

    def rank(
        self,
        start: Start,
        model: Path,
        number: int,
        fields: Mapping[str, object] = NOTHING,
        **group: object,
    ) -> Engine:
        """Start one rank, with fields of its configuration and of its group."""
        variables = {"MLX_RANK": str(number), "MLX_HOSTFILE": str(self.hostfile)}
        place = {"rank": number, "worldSize": self.size, "host": "127.0.0.1", "port": self.port}
        return start(
            model, variables=variables, group={**place, "secret": SECRET, **group}, **fields
        )


def form(
    start: Start,
    model: Path,
    folder: Path,
    size: int,
    fields: Mapping[str, object] = NOTHING,
    **group: object,
) -> list[Engine]:
    """Start all ranks of a group, and wait until it serves."""
    meeting = Meeting.of(size, folder)
    ranks = [meeting.rank(start, model, number, fields, **group) for number in range(size)]
    for rank in ranks:
        eventually(rank.is_ready, within_s=READY_S)
    return ranks


def end(ranks: Sequence[Engine]) -> list[int]:
    """Ask rank 0 to end; return all exit codes."""
    ranks[0].process.send_signal(signal.SIGTERM)
    return [rank.wait(120) for rank in ranks]


@contextmanager
def streaming(rank: Engine) -> Iterator[None]:
    """Keep a group generating inside the context."""
    stream = rank.begin(stream=True, max_tokens=4000)
    with closing(stream):
        assert stream.getresponse().read(500)
        yield


def lose(ranks: Sequence[Engine], victim: int) -> list[tuple[int, str]]:
    """Kill one rank while the group works; return the exit codes and last lines of the others."""
    with streaming(ranks[0]):
        os.kill(ranks[victim].process.pid, signal.SIGKILL)
        others = [rank for number, rank in enumerate(ranks) if number != victim]
        return [(rank.wait(120), rank.last_words()) for rank in others]
