"""The verb `fleetctl fabric bench`: measures distributed sums over a group's cables, or on this machine's loopback."""

import asyncio
import re
import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import orjson
from pydantic import TypeAdapter, ValidationError

from fleetctl.cli.arguments import output_option
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.fabric import admission
from fleetctl.fabric.admission import select_group
from fleetctl.objects import reader
from fleetctl.output import printers
from machinery.clock import SystemClock
from manifests.trees import Tree
from nodeagent.fabric import rank_process
from nodeagent.fabric.rank_process import RankMessage, RanksConnected, SumRound
from reconciler.services.fabric.runs import FabricTestError, make_test, run_test
from schemas import fabric_verdict
from schemas.fabric_verdict import FabricVerdict, SizeSummary
from schemas.fabrictest import (
    KIB,
    MIB,
    QUICK_SIZES,
    SIZES,
    FabricRank,
    FabricTestSpec,
    Sizes,
)
from schemas.formation import Formation, Rendezvous, Seat, rendezvous
from schemas.shardgroup import MOST_RANKS, Backend

_TITLES = ("SIZE", "ROUNDS", "WRONG", "FASTEST", "MEDIAN", "SLOWEST", "AVERAGE", "PEAK")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Array sizes and number of rounds."""

    sizes: tuple[int, ...]
    """Bytes."""
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Result of a benchmark."""

    about: str
    """Name of the group, or "this machine"."""
    backend: Backend
    ranks: tuple[FabricRank, ...]

    @property
    def rows(self) -> tuple[SizeSummary, ...]:
        """Return the statistics per size over all ranks."""
        return fabric_verdict.summarize_ranks(self.ranks)

    @property
    def verdict(self) -> FabricVerdict:
        """Return whether the cables are healthy, with the reason."""
        return fabric_verdict.judge(self.rows, self.backend)


def result_text(result: BenchResult, *, is_verbose: bool) -> str:
    """Return the result as text."""
    macs = ", ".join(rank.node for rank in result.ranks)
    parts = [f"{result.about}: {result.backend} over {len(result.ranks)} ranks ({macs})"]
    if is_verbose:
        parts += [_rank_text(rank) for rank in result.ranks]
    parts.append(printers.align_columns([_result_cells(row) for row in result.rows], _TITLES))
    verdict = result.verdict
    parts.append(verdict_text(verdict))
    return "\n\n".join(parts)


def verdict_text(verdict: FabricVerdict) -> str:
    """Return the verdict as text; without a speed that the cables must reach, it does not call them healthy."""
    if not verdict.is_healthy:
        return f"NOT healthy: {verdict.message}"
    if verdict.is_speed_judged:
        return f"healthy: {verdict.message}"
    return f"no sum was wrong: {verdict.message}. The speed is not judged: only JACCL at 64 MB has a least speed"


def _rank_text(rank: FabricRank) -> str:
    lines = [f"rank {rank.rank}, {rank.node}"]
    for figure in rank.figures:
        times = " ".join(duration_text(time_us) for time_us in figure.times_us)
        wrong = f" ({figure.wrong} wrong)" if figure.wrong else ""
        lines.append(f"  {size_text(figure.size)}{wrong}: {times}")
    return "\n".join(lines)


def _result_cells(one: SizeSummary) -> list[str]:
    times = (duration_text(time_us) for time_us in (one.least_us, one.median_us, one.most_us))
    speeds = (speed_text(one.average_gb_s), speed_text(one.peak_gb_s))
    return [size_text(one.size), str(one.rounds), str(one.wrong), *times, *speeds]


def size_text(count: int) -> str:
    """Return a size in bytes as text: 65536 is "64 KB"."""
    for unit, word in ((MIB, "MB"), (KIB, "KB")):
        if count % unit == 0:
            return f"{count // unit} {word}"
    return f"{count} B"


def speed_text(gb_s: float) -> str:
    """Return a speed in GB/s (10^9 bytes per second) or MB/s as text."""
    return f"{gb_s:.2f} GB/s" if gb_s >= 0.1 else f"{gb_s * 1e3:.2f} MB/s"


def duration_text(time_us: float) -> str:
    """Return microseconds as text with a suitable unit."""
    if time_us < 1e3:
        return f"{time_us:.1f} us"
    return f"{time_us / 1e3:.2f} ms" if time_us < 1e6 else f"{time_us / 1e6:.2f} s"


def result_tree(result: BenchResult) -> dict[str, Tree]:
    """Return the result for `-o json`: sizes in bytes, times in microseconds, speeds in 10^9 bytes per second."""
    verdict = result.verdict
    return {
        "about": result.about,
        "backend": result.backend,
        "isHealthy": verdict.is_healthy,
        "isSpeedJudged": verdict.is_speed_judged,
        "reason": verdict.reason,
        "message": verdict.message,
        "sizes": [_row_tree(row) for row in result.rows],
        "ranks": [rank.model_dump(mode="json", by_alias=True) for rank in result.ranks],
    }


def _row_tree(one: SizeSummary) -> Tree:
    names = {
        "least_us": "leastUs",
        "median_us": "medianUs",
        "most_us": "mostUs",
        "average_gb_s": "averageGbS",
        "peak_gb_s": "peakGbS",
    }
    return {names.get(name, name): value for name, value in asdict(one).items()}


async def measure_group(
    group: str | None,
    settings: BenchSettings,
    report: Callable[[str], None],
    options: dict[str, Any],
) -> BenchResult:
    """Run the test on the group's Macs, through their agents; it ends together with this command.

    Raises:
        FleetctlError: the group does not exist or cannot form, or a rank failed.

    """
    clock = SystemClock()
    async with open_store(options) as transport:
        shard_group = await select_group(transport, group)
        nodes, ready = await admission.read_nodes(transport), await reader.ready_nodes(transport)
        seats = admission.find_seats(shard_group, nodes, ready)
        not_ready = [seat.node for seat in seats if seat.node not in ready]
        if not_ready:
            raise FleetctlError(
                f"shardgroup/{shard_group.name}: {', '.join(not_ready)} is NotReady: its agent does not renew its lease"
            )
        test = make_test(
            shard_group,
            seats,
            figures=(settings.sizes, settings.rounds),
            uid=secrets.token_hex(16),
            now=clock.now(),
        )
        try:
            ranks = await run_test(transport, clock, test, report=report)
        except FabricTestError as error:
            raise FleetctlError(str(error)) from error
    label = f"shardgroup/{shard_group.name}"
    return BenchResult(about=label, backend=test.spec.formation.backend, ranks=ranks)


_HOST = "127.0.0.1"
_PORT_WINDOWS = 20


class _RankError(Exception):
    """A rank failed, so the whole test fails."""


async def measure_local(
    size: int, settings: BenchSettings, report: Callable[[str], None]
) -> BenchResult:
    """Run the test with `size` ranks on this machine.

    Raises:
        FleetctlError: a rank could not be started, or failed.

    """
    uid = secrets.token_hex(8)
    spec = FabricTestSpec(
        formation=Formation(group="local", formed_at=SystemClock().now()),
        seats=tuple(Seat(node=f"rank-{n}", addresses=(_HOST,)) for n in range(size)),
        sizes=settings.sizes,
        rounds=settings.rounds,
    )
    spec, meeting = _with_free_ports(uid, spec)
    messages: list[list[RankMessage]] = [[] for _ in spec.seats]
    with TemporaryDirectory(prefix="fleet-fabric-") as folder:
        try:
            async with asyncio.TaskGroup() as group:
                for rank in range(size):
                    order = rank_process.write_order(Path(folder), spec, rank, meeting)
                    on_message = _rank_listener(messages[rank], spec, report if rank == 0 else None)
                    group.create_task(_follow_rank(order, on_message))
        except* (_RankError, OSError) as failed:
            raise FleetctlError(f"the test failed: {failed.exceptions[0]}") from failed
    ranks = tuple(
        FabricRank(
            test_uid=uid,
            rank=rank,
            node=spec.seats[rank].node,
            state="Done",
            figures=rank_process.figures_by_size(
                message for message in rank_messages if isinstance(message, SumRound)
            ),
        )
        for rank, rank_messages in enumerate(messages)
    )
    return BenchResult(about="this machine", backend="ring", ranks=ranks)


async def _follow_rank(
    order: rank_process.FabricRankOrder, on_message: Callable[[RankMessage], None]
) -> None:
    why = await rank_process.run_rank(order, on_message)
    if why:
        raise _RankError(f"rank {order.rank}: {why}")


def _rank_listener(
    messages: list[RankMessage], spec: FabricTestSpec, report: Callable[[str], None] | None
) -> Callable[[RankMessage], None]:
    """Return a callback that stores a rank's messages and reports each finished size."""

    def on_message(message: RankMessage) -> None:
        messages.append(message)
        if report is None:
            return
        if isinstance(message, RanksConnected):
            report(f"{len(spec.seats)} ranks are connected")
        if isinstance(message, SumRound):
            done = sum(isinstance(one, SumRound) and one.size == message.size for one in messages)
            if done == spec.rounds:
                report(f"{size_text(message.size)} done")

    return on_message


def _with_free_ports(uid: str, spec: FabricTestSpec) -> tuple[FabricTestSpec, Rendezvous]:
    """Return the first epoch whose ports are all free at this moment."""
    for epoch in range(1, _PORT_WINDOWS + 1):
        formation = spec.formation.model_copy(update={"epoch": epoch})
        meeting = rendezvous(uid, formation, spec.seats)
        if all(_is_free(address) for addresses in meeting.hosts for address in addresses):
            return spec.model_copy(update={"formation": formation}), meeting
    raise FleetctlError(
        f"no free ports between {spec.formation.port} and {spec.formation.port + 8192}; stop the processes that listen there"
    )


def _is_free(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
    return True


_HELP = """Measure sums of arrays (4 KB to 64 MB) over the cables of a group: correctness, latency and throughput.

\b
  fleetctl fabric bench studios
  fleetctl fabric bench studios --stress -o json
  fleetctl fabric bench --local 2

Each Mac's agent starts a separate process for the test. The test and running models slow each other down. The figures
are those of the slowest rank. Over JACCL, expect more than 5 GB/s at 64 MB. The result becomes the condition
FabricHealthy of the Macs. Exit code 1: a sum was wrong, or the speed is lower than the cables allow.

--local runs N ranks over the loopback of this machine, without a fleet. It shows whether MLX's ring works, and the
highest speed that it can reach.
"""
_UNITS = {"": 1, "k": 2**10, "m": 2**20}


def _parse_sizes(
    _: click.Context, __: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Parse --sizes into bytes."""
    if value is None:
        return None
    found = []
    for text in value.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,10})\s*([kKmM]?)(?:i?[bB])?\s*", text)
        if match is None:
            raise click.BadParameter(
                f"{text!r} is not a size; expected sizes such as 4K,256K,4M,64M"
            )
        found.append(int(match[1]) * _UNITS[match[2].lower()])
    try:
        return TypeAdapter(Sizes).validate_python(tuple(dict.fromkeys(found)))
    except ValidationError as error:
        raise click.BadParameter(error.errors()[0]["msg"]) from error


@click.command(help=_HELP)
@click.argument("group", required=False)
@click.option(
    "--local",
    type=click.IntRange(2, MOST_RANKS),
    metavar="N",
    help="Run N ranks on this machine instead of a group.",
)
@click.option("--quick", "pace", flag_value="quick", help="Test 4 sizes, 5 rounds each.")
@click.option("--stress", "pace", flag_value="stress", help="Test 8 sizes, 100 rounds each.")
@click.option("--rounds", type=click.IntRange(1, 10_000), help="Rounds per size (default 20).")
@click.option(
    "--sizes",
    callback=_parse_sizes,
    metavar="SIZE,...",
    help="Array sizes, such as 4K,256K,4M,64M, or in bytes.",
)
@click.option("--verbose", is_flag=True, help="Show every rank, with the time of each round.")
@output_option("table", "json")
@store_options
def bench(
    group: str | None,
    local: int | None,
    pace: str | None,
    verbose: bool,
    output: str,
    **options: Any,
) -> None:
    """Measure sums over the cables of a group."""
    if group is not None and local is not None:
        raise click.UsageError("give either a group or --local, not both")
    report = _progress_printer(verbose=verbose and output == "table")
    settings = _bench_settings(pace, options["sizes"], options["rounds"])
    if local is not None:
        result = run(measure_local(local, settings, report))
    else:
        result = run(measure_group(group, settings, report, options))
    if output == "json":
        click.echo(orjson.dumps(result_tree(result), option=orjson.OPT_INDENT_2))
    else:
        click.echo(result_text(result, is_verbose=verbose))
    if not result.verdict.is_healthy:
        raise click.exceptions.Exit(1)


def _bench_settings(
    pace: str | None, sizes: tuple[int, ...] | None, rounds: int | None
) -> BenchSettings:
    usual = {"quick": 5, "stress": 100}.get(pace or "", 20)
    return BenchSettings(
        sizes=sizes or (QUICK_SIZES if pace == "quick" else SIZES), rounds=rounds or usual
    )


def _progress_printer(*, verbose: bool) -> Callable[[str], None]:
    """Return a function that prints progress on stderr at a terminal or with --verbose, and nothing otherwise."""
    if verbose or sys.stderr.isatty():
        return lambda text: click.echo(text, err=True)
    return lambda _: None
