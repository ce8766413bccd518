"""One rank of a fabric test as a child process: its order, its messages, and its supervision. Never imports mlx.

The order is the child's command line. Messages are JSON, one a line, on its standard output.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from schemas.fabrictest import (
    CONNECT_TIMEOUT_S,
    ROUND_TIMEOUT_S,
    FabricFigures,
    FabricTestSpec,
)
from schemas.formation import Rendezvous
from schemas.shardgroup import Backend

FABRIC_MODULE = "nodeagent.fabric"


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricRankOrder:
    """The parameters of one rank."""

    rank: int
    size: int
    """The number of ranks."""
    backend: Backend
    hostfile: Path
    devices: Path | None = None
    coordinator: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[int, ...]
    """Bytes."""
    rounds: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables by which MLX finds the other ranks."""
        found = {**self.environment, "MLX_RANK": str(self.rank), "MLX_HOSTFILE": str(self.hostfile)}
        if self.devices is not None:
            found["MLX_IBV_DEVICES"] = str(self.devices)
            found["MLX_JACCL_COORDINATOR"] = self.coordinator
        if self.backend == "jaccl-ring":
            found["MLX_JACCL_RING"] = "1"
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksConnected:
    """All ranks are connected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumRound:
    """One measured sum."""

    size: int
    """Bytes."""
    took_us: float
    is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBroken:
    """MLX failed."""

    why: str


RankMessage: TypeAlias = RanksConnected | SumRound | RankBroken


def write_order(
    folder: Path, spec: FabricTestSpec, rank: int, found: Rendezvous
) -> FabricRankOrder:
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
    return FabricRankOrder(
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


def rank_command(order: FabricRankOrder) -> list[str]:
    """Return the child's command line."""
    devices = () if order.devices is None else ("--devices", str(order.devices))
    return [
        *(sys.executable, "-m", FABRIC_MODULE),
        *("--rank", str(order.rank), "--size", str(order.size), "--backend", order.backend),
        *("--hostfile", str(order.hostfile), *devices, "--coordinator", order.coordinator),
        *(f"--set={name}={value}" for name, value in order.environment.items()),
        *("--rounds", str(order.rounds), "--bytes", ",".join(map(str, order.sizes))),
    ]


def parse_order(arguments: Sequence[str] | None) -> FabricRankOrder:
    """Return the order in a command line; exits with code 2 if it is invalid."""
    parser = argparse.ArgumentParser(
        prog=FABRIC_MODULE, description="One rank of a test of the fabric."
    )
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--backend", choices=("ring", "jaccl", "jaccl-ring"), required=True)
    parser.add_argument("--hostfile", type=Path, required=True)
    parser.add_argument("--devices", type=Path)
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--bytes", required=True)
    flags = parser.parse_args(arguments)
    backend: Backend = flags.backend
    return FabricRankOrder(
        rank=flags.rank,
        size=flags.size,
        backend=backend,
        hostfile=flags.hostfile,
        devices=flags.devices,
        coordinator=flags.coordinator,
        environment=dict(_parse_pair(text) for text in flags.set),
        sizes=tuple(int(text) for text in flags.bytes.split(",")),
        rounds=flags.rounds,
    )


def _parse_pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def encode_message(message: RankMessage) -> str:
    """Return the message as one line."""
    match message:
        case RanksConnected():
            return '{"connected": true}'
        case SumRound():
            return json.dumps([message.size, message.took_us, message.is_right])
        case RankBroken():
            return json.dumps({"broken": message.why})


def decode_message(line: bytes) -> RankMessage | None:
    """Return the message in a line; None for another line, such as MLX's own output."""
    try:
        tree = json.loads(line)
    except ValueError:
        return None
    match tree:
        case {"connected": True}:
            return RanksConnected()
        case [int(size), float(took_us), bool(is_right)]:
            return SumRound(size=size, took_us=took_us, is_right=is_right)
        case {"broken": str(why)}:
            return RankBroken(why=why)
        case _:
            return None


def figures_by_size(rounds: Iterable[SumRound]) -> tuple[FabricFigures, ...]:
    """Return the rounds by size, in their order."""
    by_size: dict[int, list[SumRound]] = {}
    for sum_round in rounds:
        by_size.setdefault(sum_round.size, []).append(sum_round)
    return tuple(
        FabricFigures(
            size=size,
            times_us=tuple(sum_round.took_us for sum_round in found),
            wrong=sum(not sum_round.is_right for sum_round in found),
        )
        for size, found in by_size.items()
    )


# The child's own alarm ends it at its deadlines; this is for a frozen child.
_SILENCE_TIMEOUT_S = max(CONNECT_TIMEOUT_S, ROUND_TIMEOUT_S) + 5
_MAX_STDERR_BYTES = 400


async def run_rank(order: FabricRankOrder, on_message: Callable[[RankMessage], None]) -> str:
    """Run one rank to its end and pass its messages to `on_message`; return the error, "" if there is none.

    Raises:
        OSError: it could not be started.

    """
    async with _running_process(order) as process, asyncio.TaskGroup() as group:
        tail = group.create_task(_stderr_tail(process))
        why = await _read_messages(process, on_message)
        if why:
            _kill_process(process)
        code = await process.wait()
        output = await tail
    if why or code == 0:
        return why
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    if code == -14:
        ended = f"it made no progress for {CONNECT_TIMEOUT_S} s while connecting, or for {ROUND_TIMEOUT_S} s in one round"
    return f"its process ended: {ended}{f' ({output})' if output else ''}"


@asynccontextmanager
async def _running_process(order: FabricRankOrder) -> AsyncIterator[Process]:
    """Start the child, and kill it at the end of the block."""
    process = await asyncio.create_subprocess_exec(
        *rank_command(order), stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        _kill_process(process)
        await process.wait()


def _kill_process(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _read_messages(process: Process, on_message: Callable[[RankMessage], None]) -> str:
    assert process.stdout is not None
    why = ""
    while True:
        try:
            async with asyncio.timeout(_SILENCE_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            return f"its process wrote nothing for {_SILENCE_TIMEOUT_S} s"
        if not line:
            return why
        message = decode_message(line)
        if isinstance(message, RankBroken):
            why = message.why
        if message is not None:
            on_message(message)


async def _stderr_tail(process: Process) -> str:
    """Return the end of its standard error."""
    assert process.stderr is not None
    found = b""
    while piece := await process.stderr.read(_MAX_STDERR_BYTES):
        found = (found + piece)[-_MAX_STDERR_BYTES:]
    return " ".join(found.decode(errors="replace").split())
