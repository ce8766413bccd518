"""Real ranks of a fabric test on this machine: correct sums, and ends that leave nothing behind."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from machinery.clock import SystemClock
from nodeagent.fabric import rank_process
from nodeagent.fabric.rank_process import FabricRankOrder, RankMessage, RanksConnected, SumRound
from schemas import fabrictest
from schemas.fabrictest import FabricTestSpec
from schemas.formation import Formation, Seat, rendezvous
from tests.support.fleet import fleetctl
from tests.support.ports import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(120)


def order(folder: Path, *, rank: int = 0, rounds: int = 10_000) -> FabricRankOrder:
    """Return one of two ranks, which are to meet on ports that are free now."""
    spec = FabricTestSpec(
        formation=Formation(group="g", formed_at=SystemClock().now()),
        seats=(Seat(node="a", addresses=("127.0.0.1",)), Seat(node="b", addresses=("127.0.0.1",))),
        sizes=(65536,),
        rounds=rounds,
    )
    return rank_process.write_order(
        folder, spec, rank, rendezvous(str(folder), spec.formation, spec.seats)
    )


def ranks() -> list[psutil.Process]:
    """Return the ranks that this process started and that have not ended."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and rank_process.FABRIC_MODULE in child.cmdline()
    ]


@pytest.mark.ci
async def test_three_ranks_on_this_machine() -> None:
    words = ("--local", "3", "--sizes", "4K,101,1M", "--rounds", "2", "-o", "json")
    done = await fleetctl("fabric", "bench", *words)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [(one["size"], one["rounds"], one["wrong"]) for one in result["sizes"]] == [
        (4096, 2, 0), (101, 2, 0), (2**20, 2, 0),
    ]  # fmt: skip
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1, 2]
    assert result["message"] == "sums are right over ring"


@pytest.mark.parametrize(("words", "said"), [
    (("--local", "1"), "2<=x<=16"),
    (("g", "--local", "2"), "give either a group or --local"),
    (("--local", "2", "--sizes", "4X"), "is not a size; expected sizes such as 4K,256K"),
    (("--local", "2", "--sizes", "3"), "greater than or equal to 4"),
])  # fmt: skip
async def test_bad_words(words: tuple[str, ...], said: str) -> None:
    done = await fleetctl("fabric", "bench", *words)
    assert done.code == 2
    assert said in done.err


@pytest.mark.ci
@pytest.mark.parametrize("lost", [0, 1])
async def test_a_rank_that_loses_its_peer_reports_it(tmp_path: Path, lost: int) -> None:
    heard: list[list[RankMessage]] = [[], []]
    async with asyncio.TaskGroup() as group:
        ended = [
            group.create_task(rank_process.run_rank(order(tmp_path, rank=rank), heard[rank].append))
            for rank in range(2)
        ]
        await until(lambda: all(len(words) > 2 for words in heard), what="rounds")
        (victim,) = [
            p for p in ranks() if p.cmdline()[p.cmdline().index("--rank") + 1] == str(lost)
        ]
        victim.kill()
    assert ended[lost].result() == "its process ended: signal 9"
    # MLX's ring says it in one sentence, whichever of its threads sees it first.
    assert "[ring]" in ended[1 - lost].result() or "lost" in ended[1 - lost].result()
    for words in heard:
        assert words[0] == RanksConnected()
        assert all(word.is_right for word in words if isinstance(word, SumRound))


async def test_a_parent_that_stops_leaves_no_rank(tmp_path: Path) -> None:
    """Rank 0 waits for the other one with no Python running: it is ended all the same."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(rank_process.run_rank(order(tmp_path), lambda _: None))
        rank = await until(lambda: next(iter(ranks()), None), what="the rank")
        task.cancel()
    assert not rank.is_running()


def test_a_rank_ends_by_the_kernels_alarm(tmp_path: Path) -> None:
    """The alarm has its default action, and is armed before MLX is asked to connect."""
    assert fabrictest.CONNECT_TIMEOUT_S > 31
    command = rank_process.rank_command(order(tmp_path))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            _wait_until_it_listens(process.pid)
            process.send_signal(signal.SIGALRM)
            assert process.wait(30) == -signal.SIGALRM
        finally:
            process.kill()


async def test_a_rank_that_cannot_connect_reports_the_error(tmp_path: Path) -> None:
    fabric_rank_order = order(tmp_path, rounds=1)
    fabric_rank_order.hostfile.write_text(
        json.dumps([[f"192.0.2.1:{free_port()}"], [f"127.0.0.1:{free_port()}"]])
    )
    why = await rank_process.run_rank(fabric_rank_order, lambda _: None)
    assert "[ring]" in why


def _wait_until_it_listens(pid: int) -> None:
    def listens() -> bool:
        there = psutil.Process(pid).net_connections()
        return any(pconn.status == psutil.CONN_LISTEN for pconn in there)

    asyncio.run(until(listens, what="a rank that listens"))


def test_the_child_needs_nothing_of_the_engine() -> None:
    code = "import sys, nodeagent.fabric.__main__; assert not {'mlx', 'mlx_lm', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
