"""What a rank of the test is started with, and what it says while it runs. Pure but for the files it names.

Orders are the child's command line; what it says is JSON, one value a line, on its standard output.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from schemas.fabrictest import FabricTestSpec
from schemas.rendezvous import Rendezvous
from schemas.shardgroup import Backend

MODULE = "nodeagent.fabric"
# A rank of MLX's ring tries for 31 s to reach its neighbour (spec of MLX 0.32: 1, 2, 4, 8, 16 s); rank 0 waits for ever.
CONNECT_S = 45
# 64 MB around a ring of wifi, at 3 MB/s.
ROUND_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one rank does."""

    rank: int
    size: int
    """Of the world."""
    backend: Backend
    hostfile: Path
    devices: Path | None = None
    coordinator: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[int, ...]
    """Bytes."""
    rounds: int

    def variables(self) -> dict[str, str]:
        """Return the environment that MLX finds the other ranks by."""
        found = {**self.environment, "MLX_RANK": str(self.rank), "MLX_HOSTFILE": str(self.hostfile)}
        if self.devices is not None:
            found["MLX_IBV_DEVICES"] = str(self.devices)
            found["MLX_JACCL_COORDINATOR"] = self.coordinator
        if self.backend == "jaccl-ring":
            found["MLX_JACCL_RING"] = "1"
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """All ranks reached each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One sum."""

    size: int
    """Bytes."""
    took_us: float
    is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """MLX gave up."""

    why: str


Word: TypeAlias = Connected | Round | Broken


def place(folder: Path, spec: FabricTestSpec, rank: int, found: Rendezvous) -> Order:
    """Write the files of one rank into its folder, and return its order.

    Raises:
        OSError: they cannot be written.

    """
    folder.mkdir(parents=True, exist_ok=True)
    hostfile = folder / f"hosts-{rank}.json"
    hostfile.write_text(json.dumps(found.hosts))
    devices = None
    if found.devices is not None:
        devices = folder / f"devices-{rank}.json"
        matrix = [[list(cell) or None for cell in row] for row in found.devices]
        devices.write_text(json.dumps(matrix))
    host, port = found.coordinator
    return Order(
        rank=rank,
        size=len(spec.seats),
        backend=spec.formation.backend,
        hostfile=hostfile,
        devices=devices,
        coordinator=f"{host}:{port}",
        environment=spec.formation.environment,
        sizes=spec.sizes,
        rounds=spec.rounds,
    )


def command(order: Order) -> list[str]:
    """Return the child's command line."""
    devices = () if order.devices is None else ("--devices", str(order.devices))
    return [
        *(sys.executable, "-m", MODULE),
        *("--rank", str(order.rank), "--size", str(order.size), "--backend", order.backend),
        *("--hostfile", str(order.hostfile), *devices, "--coordinator", order.coordinator),
        *(f"--set={name}={value}" for name, value in order.environment.items()),
        *("--rounds", str(order.rounds), "--bytes", ",".join(map(str, order.sizes))),
    ]


def parse(arguments: Sequence[str] | None) -> Order:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(prog=MODULE, description="One rank of a test of the fabric.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--backend", choices=("ring", "jaccl", "jaccl-ring"), required=True)
    parser.add_argument("--hostfile", type=Path, required=True)
    parser.add_argument("--devices", type=Path)
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--bytes", required=True)
    said = parser.parse_args(arguments)
    backend: Backend = said.backend
    return Order(
        rank=said.rank,
        size=said.size,
        backend=backend,
        hostfile=said.hostfile,
        devices=said.devices,
        coordinator=said.coordinator,
        environment=dict(_pair(text) for text in said.set),
        sizes=tuple(int(text) for text in said.bytes.split(",")),
        rounds=said.rounds,
    )


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def spell(word: Word) -> str:
    """Return the word as a line."""
    match word:
        case Connected():
            return '{"connected": true}'
        case Round():
            return json.dumps([word.size, word.took_us, word.is_right])
        case Broken():
            return json.dumps({"broken": word.why})


def heard(line: bytes) -> Word | None:
    """Return what a line says; None if it is none of ours, such as a line of MLX's own."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    match said:
        case {"connected": True}:
            return Connected()
        case [int(size), float(took_us), bool(is_right)]:
            return Round(size=size, took_us=took_us, is_right=is_right)
        case {"broken": str(why)}:
            return Broken(why=why)
        case _:
            return None
