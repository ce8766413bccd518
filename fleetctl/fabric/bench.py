"""What `fleetctl fabric bench` was asked for, and how its result is shown. Pure.

The test of the fabric by agents: written under a lease, so that it ends with this command, and waited for.

The test of the fabric on one machine: ranks on its loopback, without a fleet.

`fleetctl fabric bench`: how fast, and whether rightly, the Macs of a group sum arrays together.
"""

import asyncio
import re
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import orjson
from pydantic import TypeAdapter, ValidationError

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.fabric import admission
from fleetctl.fabric.admission import select_group
from fleetctl.objects import reader
from fleetctl.output import printers
from machinery.clock import Clock, SystemClock
from manifests.trees import Tree
from nodeagent.fabric import measurements, rank_process
from nodeagent.fabric.measurements import FabricVerdict, SizeSummary
from nodeagent.fabric.rank_process import (
    CONNECT_TIMEOUT_S,
    ROUND_TIMEOUT_S,
    RankMessage,
    RanksConnected,
    SumRound,
)
from schemas.fabrictest import (
    KIB,
    MIB,
    QUICK_SIZES,
    SIZES,
    FabricRank,
    FabricTest,
    FabricTestSpec,
    Sizes,
)
from schemas.formation import Formation, Rendezvous, Seat, rendezvous
from schemas.meta import ObjectMeta
from schemas.shardgroup import MOST_RANKS, Backend, ShardGroup
from store import codec, keys
from store.errors import ConflictError, StoreError, UnavailableError
from store.leases import LeaseSession
from store.port import ModRevisionGuard, Put, Transport

_TITLES = ("SIZE", "ROUNDS", "WRONG", "FASTEST", "MEDIAN", "SLOWEST", "AVERAGE", "PEAK")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What is summed, and how often."""

    sizes: tuple[int, ...]
    """Bytes."""
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """What came out."""

    about: str
    """The group, or this machine."""
    backend: Backend
    ranks: tuple[FabricRank, ...]

    @property
    def rows(self) -> tuple[SizeSummary, ...]:
        return measurements.summarize_ranks(self.ranks)

    @property
    def verdict(self) -> FabricVerdict:
        return measurements.judge(self.rows, self.backend)


def result_text(result: BenchResult, *, is_verbose: bool) -> str:
    """Return the result for people."""
    macs = ", ".join(rank.node for rank in result.ranks)
    parts = [f"{result.about}: {result.backend} over {len(result.ranks)} ranks ({macs})"]
    if is_verbose:
        parts += [_rank_text(rank) for rank in result.ranks]
    parts.append(printers.align_columns([_result_cells(one) for one in result.rows], _TITLES))
    verdict = result.verdict
    parts.append(f"{'healthy' if verdict.is_healthy else 'NOT healthy'}: {verdict.message}")
    return "\n\n".join(parts)


def _rank_text(rank: FabricRank) -> str:
    lines = [f"rank {rank.rank}, {rank.node}"]
    for one in rank.figures:
        times = " ".join(duration_text(took) for took in one.times_us)
        wrong = f" ({one.wrong} wrong)" if one.wrong else ""
        lines.append(f"  {size_text(one.size)}{wrong}: {times}")
    return "\n".join(lines)


def _result_cells(one: SizeSummary) -> list[str]:
    times = (duration_text(took) for took in (one.least_us, one.median_us, one.most_us))
    speeds = (speed_text(one.average_gb_s), speed_text(one.peak_gb_s))
    return [size_text(one.size), str(one.rounds), str(one.wrong), *times, *speeds]


def size_text(count: int) -> str:
    """Return bytes as people name them: 65536 is "64 KB"."""
    for unit, word in ((MIB, "MB"), (KIB, "KB")):
        if count % unit == 0:
            return f"{count // unit} {word}"
    return f"{count} B"


def speed_text(gb_s: float) -> str:
    """Return 10^9 bytes a second in the unit that suits them."""
    return f"{gb_s:.2f} GB/s" if gb_s >= 0.1 else f"{gb_s * 1e3:.2f} MB/s"


def duration_text(took_us: float) -> str:
    """Return microseconds in the unit that suits them."""
    if took_us < 1e3:
        return f"{took_us:.1f} us"
    return f"{took_us / 1e3:.2f} ms" if took_us < 1e6 else f"{took_us / 1e6:.2f} s"


def result_tree(result: BenchResult) -> dict[str, Tree]:
    """Return the result for programs: sizes in bytes, times in microseconds, speeds in 10^9 bytes a second."""
    verdict = result.verdict
    return {
        "about": result.about,
        "backend": result.backend,
        "isHealthy": verdict.is_healthy,
        "reason": verdict.reason,
        "message": verdict.message,
        "sizes": [_row_tree(one) for one in result.rows],
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


_TEST_LEASE_S = 10
_POLL_S = 0.2
# An agent hears of a test within a moment; one that has not said so by now does not know what tests are.
_CLAIM_S = 15.0
# The ranks' own deadlines end them earlier.
_SILENT_S = CONNECT_TIMEOUT_S + ROUND_TIMEOUT_S


async def measure_group(
    group: str | None, wanted: BenchSettings, tell: Callable[[str], None], options: dict[str, Any]
) -> BenchResult:
    """Have the agents of the group's Macs test its cables.

    Raises:
        FleetctlError: there is no such group, it cannot be formed, or a rank did not come to its end.

    """
    clock = SystemClock()
    async with open_store(options) as transport:
        found = await select_group(transport, group)
        test = await _build_test(transport, clock, found, wanted)
        lease = LeaseSession(transport, clock, ttl_s=_TEST_LEASE_S)
        await lease.open()
        try:
            await _write_test(transport, test, lease.id)
            ranks = await _wait_for_ranks(transport, clock, test, lease, tell)
        finally:
            await lease.close()
    label = f"shardgroup/{found.name}"
    return BenchResult(about=label, backend=test.spec.formation.backend, ranks=ranks)


async def _build_test(
    transport: Transport, clock: Clock, group: ShardGroup, wanted: BenchSettings
) -> FabricTest:
    nodes, ready = await admission.read_nodes(transport), await reader.ready_nodes(transport)
    seats = admission.find_seats(group, nodes, ready)
    away = [seat.node for seat in seats if seat.node not in ready]
    if away:
        raise FleetctlError(
            f"shardgroup/{group.name}: {', '.join(away)} is NotReady: its agent does not renew its lease"
        )
    spec = group.spec
    return FabricTest(
        metadata=ObjectMeta(
            name=group.name, uid=secrets.token_hex(16), creation_timestamp=clock.now()
        ),
        spec=FabricTestSpec(
            formation=Formation(
                group=group.name,
                backend=spec.backend,
                port=spec.port,
                environment=spec.environment,
                formed_at=clock.now(),
            ),
            seats=seats,
            sizes=wanted.sizes,
            rounds=wanted.rounds,
        ),
    )


async def _write_test(transport: Transport, test: FabricTest, lease: int) -> None:
    key = keys.named(keys.FABRIC_TEST_PREFIX, test.name)
    put = Put(key=key, value=codec.encode_spec(test), lease=lease)
    try:
        await transport.commit([ModRevisionGuard(key=key, mod_revision=0)], [put])
    except ConflictError as error:
        raise FleetctlError(
            f"shardgroup/{test.name} is being tested already; wait for that, or a moment if it was broken off"
        ) from error


async def _wait_for_ranks(
    transport: Transport,
    clock: Clock,
    test: FabricTest,
    lease: LeaseSession,
    tell: Callable[[str], None],
) -> tuple[FabricRank, ...]:
    """Return what all ranks said at the end, while the lease is kept."""
    reports = _RankReports(transport, clock, test, tell)
    try:
        async with asyncio.TaskGroup() as tasks:
            kept = tasks.create_task(lease.keep())
            ranks = await reports.wait(lease)
            kept.cancel()
    except* (FleetctlError, StoreError, codec.UndecodableError) as failed:
        raise failed.exceptions[0] from None
    return ranks


class _RankReports:
    """What the agents say of one test; remembers how far they were."""

    def __init__(
        self, transport: Transport, clock: Clock, test: FabricTest, tell: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._test = test
        self._tell = tell
        self._said: dict[int, FabricRank] = {}

    async def wait(self, lease: LeaseSession) -> tuple[FabricRank, ...]:
        """Wait until every rank is done.

        Raises:
            FleetctlError: one failed, or nobody said anything for too long.

        """
        moved_at = self._clock.monotonic()
        while True:
            if await self._look():
                moved_at = self._clock.monotonic()
            failed = [rank for rank in self._said.values() if rank.state == "Failed"]
            if failed:
                raise FleetctlError(f"the test broke off: {_failure_text(failed)}")
            seats = self._test.spec.seats
            if all(self._state(rank) == "Done" for rank in range(len(seats))):
                return tuple(self._said[rank] for rank in range(len(seats)))
            self._check(lease, self._clock.monotonic() - moved_at)
            await self._clock.sleep(_POLL_S)

    def _check(self, lease: LeaseSession, silent_s: float) -> None:
        """Give up where waiting is no use any more."""
        if not lease.valid():
            raise FleetctlError("the test broke off: the store was away for too long")
        seats = self._test.spec.seats
        absent = [seat.node for rank, seat in enumerate(seats) if rank not in self._said]
        if absent and silent_s > _CLAIM_S:
            raise FleetctlError(
                f"the test broke off: the agent of {', '.join(absent)} did not begin within {_CLAIM_S:g} s; "
                "does it run this version of mlx-fleet? See: fleetctl fabric matrix"
            )
        if silent_s > _SILENT_S:
            raise FleetctlError(f"the test broke off: no rank went on for {_SILENT_S:g} s")

    async def _look(self) -> bool:
        """Read what ranks say; return whether any of it is news."""
        is_news = False
        for rank, seat in enumerate(self._test.spec.seats):
            try:
                item = await self._transport.get(keys.fabric_rank_key(seat.node, self._test.name))
            except UnavailableError:
                return is_news  # the lease's deadline decides how long
            if item is None:
                continue
            said = codec.decode(FabricRank, item)
            if said.test_uid != self._test.metadata.uid or said == self._said.get(rank):
                continue
            is_news, before = True, self._said.get(rank)
            self._said[rank] = said
            count = len(said.figures)
            if before is None or len(before.figures) != count:
                self._tell(
                    f"rank {rank}, {seat.node}: {count} of {len(self._test.spec.sizes)} sizes"
                )
        return is_news

    def _state(self, rank: int) -> str:
        return self._said[rank].state if rank in self._said else ""


def _failure_text(failed: Sequence[FabricRank]) -> str:
    return "; ".join(f"rank {one.rank} ({one.node}): {one.message}" for one in failed)


_HOST = "127.0.0.1"
_PORT_WINDOWS = 20


class _RankError(Exception):
    """A rank did not come to its end; the others cannot either."""


async def measure_local(
    size: int, wanted: BenchSettings, tell: Callable[[str], None]
) -> BenchResult:
    """Run the test with so many ranks.

    Raises:
        FleetctlError: a rank could not be started, or did not come to its end.

    """
    uid = secrets.token_hex(8)
    spec = FabricTestSpec(
        formation=Formation(group="local", formed_at=SystemClock().now()),
        seats=tuple(Seat(node=f"rank-{n}", addresses=(_HOST,)) for n in range(size)),
        sizes=wanted.sizes,
        rounds=wanted.rounds,
    )
    spec, found = _with_free_ports(uid, spec)
    heard: list[list[RankMessage]] = [[] for _ in spec.seats]
    with TemporaryDirectory(prefix="fleet-fabric-") as folder:
        try:
            async with asyncio.TaskGroup() as group:
                for rank in range(size):
                    order = rank_process.write_order(Path(folder), spec, rank, found)
                    hear = _rank_listener(heard[rank], spec, tell if rank == 0 else None)
                    group.create_task(_follow_rank(order, hear))
        except* (_RankError, OSError) as failed:
            raise FleetctlError(f"the test broke off: {failed.exceptions[0]}") from failed
    ranks = tuple(
        FabricRank(
            test_uid=uid,
            rank=rank,
            node=spec.seats[rank].node,
            state="Done",
            figures=measurements.figures_by_size(
                word for word in words if isinstance(word, SumRound)
            ),
        )
        for rank, words in enumerate(heard)
    )
    return BenchResult(about="this machine", backend="ring", ranks=ranks)


async def _follow_rank(
    order: rank_process.FabricRankOrder, hear: Callable[[RankMessage], None]
) -> None:
    why = await rank_process.run_rank(order, hear)
    if why:
        raise _RankError(f"rank {order.rank}: {why}")


def _rank_listener(
    heard: list[RankMessage], spec: FabricTestSpec, tell: Callable[[str], None] | None
) -> Callable[[RankMessage], None]:
    """Return what keeps a rank's words, and tells of each size that is done."""

    def hear(word: RankMessage) -> None:
        heard.append(word)
        if tell is None:
            return
        if isinstance(word, RanksConnected):
            tell(f"{len(spec.seats)} ranks are connected")
        if isinstance(word, SumRound):
            done = sum(isinstance(one, SumRound) and one.size == word.size for one in heard)
            if done == spec.rounds:
                tell(f"{size_text(word.size)} done")

    return hear


def _with_free_ports(uid: str, spec: FabricTestSpec) -> tuple[FabricTestSpec, Rendezvous]:
    """Return the first epoch whose ports nobody listens on; somebody may take one a moment later."""
    for epoch in range(1, _PORT_WINDOWS + 1):
        formation = spec.formation.model_copy(update={"epoch": epoch})
        found = rendezvous(uid, formation, spec.seats)
        if all(_is_free(place) for places in found.hosts for place in places):
            return spec.model_copy(update={"formation": formation}), found
    raise FleetctlError(
        f"no free ports between {spec.formation.port} and {spec.formation.port + 8192}; what listens there?"
    )


def _is_free(place: str) -> bool:
    host, _, port = place.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
    return True


_HELP = """Sum arrays of 4 KB to 64 MB over the cables of a group: are the sums right, how long does one take, how much
goes through in a second.

\b
  fleetctl fabric bench studios
  fleetctl fabric bench studios --stress -o json
  fleetctl fabric bench --local 2

Each Mac's agent starts a process of its own for it, as for a rank of a model; what models do meanwhile makes it slower,
and is made slower. The figures are those of the slowest rank. Over JACCL more than 5 GB/s at 64 MB are expected. What
came out becomes the condition FabricHealthy of the Macs. Exit code 1: a sum was wrong, or the speed is not what the
cables give.

--local runs N ranks on this machine over its loopback, without a fleet: whether MLX's ring works here, and how fast
it can be at most.
"""
_UNITS = {"": 1, "k": 2**10, "m": 2**20}


def _parse_sizes(
    _: click.Context, __: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Return the bytes that --sizes says."""
    if value is None:
        return None
    found = []
    for text in value.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,10})\s*([kKmM]?)(?:i?[bB])?\s*", text)
        if match is None:
            raise click.BadParameter(f"{text!r} is no size; write such as 4K,256K,4M,64M")
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
    help="N ranks on this machine instead of a group.",
)
@click.option("--quick", "pace", flag_value="quick", help="4 sizes, 5 rounds.")
@click.option("--stress", "pace", flag_value="stress", help="8 sizes, 100 rounds.")
@click.option(
    "--rounds", type=click.IntRange(1, 10_000), help="How often each size is summed (else 20)."
)
@click.option("--sizes", callback=_parse_sizes, metavar="SIZE,...", help="Such as 4K,256K,4M,64M.")
@click.option("--verbose", is_flag=True, help="Every rank, and what each of its rounds took.")
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@store_options
def bench(
    group: str | None,
    local: int | None,
    pace: str | None,
    verbose: bool,
    output: str,
    **options: Any,
) -> None:
    """Run the test, and print what came out."""
    if group is not None and local is not None:
        raise click.UsageError("name a group, or give --local: one of them")
    told = _progress_printer(verbose=verbose and output == "table")
    wanted = _bench_settings(pace, options["sizes"], options["rounds"])
    if local is not None:
        result = run(measure_local(local, wanted, told))
    else:
        result = run(measure_group(group, wanted, told, options))
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
    """Return who tells how far it is: on a terminal, or if asked; what is printed at the end is for programs, too."""
    if verbose or sys.stderr.isatty():
        return lambda text: click.echo(text, err=True)
    return lambda _: None
