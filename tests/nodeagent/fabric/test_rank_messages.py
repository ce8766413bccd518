"""The messages between a rank and its parent, its order, and the figures over rounds."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.fabric import rank_process
from nodeagent.fabric.rank_process import (
    FabricRankOrder,
    RankBroken,
    RankMessage,
    RanksConnected,
    SumRound,
)
from schemas import fabric_verdict
from schemas.fabrictest import FabricTestSpec
from schemas.formation import Formation, Seat, rendezvous
from schemas.shardgroup import Backend
from tests.support.clock import FakeClock

rounds = st.builds(
    SumRound, size=st.sampled_from([4096, 65536]), took_us=st.floats(0, 1e8), is_right=st.booleans()
)


@given(found=st.lists(rounds, max_size=12))
def test_every_round_is_counted_once(found: list[SumRound]) -> None:
    made = rank_process.figures_by_size(found)
    assert sum(len(figures.times_us) for figures in made) == len(found)
    assert sum(figures.wrong for figures in made) == sum(
        not sum_round.is_right for sum_round in found
    )
    for summary in map(fabric_verdict.summarize_rank, made):
        assert summary.least_us <= summary.median_us <= summary.most_us
        assert 0 < summary.average_gb_s <= summary.peak_gb_s * (1 + 1e-9)


@given(word=rounds | st.just(RanksConnected()) | st.builds(RankBroken, why=st.text()))
def test_a_message_survives_encoding(word: RankMessage) -> None:
    line = rank_process.encode_message(word)
    assert "\n" not in line
    assert rank_process.decode_message(line.encode()) == word


@given(line=st.binary() | st.sampled_from([b"1", b"null", b"[1]", b'{"broken": 3}', b"[true, 1.0, 1]"]))  # fmt: skip
def test_other_lines_are_no_words(line: bytes) -> None:
    assert rank_process.decode_message(line) is None


@pytest.mark.parametrize("backend", ["ring", "jaccl", "jaccl-ring"])
def test_orders_survive_the_command_line(backend: Backend, tmp_path: Path) -> None:
    links = ((), ("rdma_en5",)) if backend != "ring" else ()
    spec = FabricTestSpec(
        formation=Formation(
            group="g",
            backend=backend,
            environment={"MLX_METAL_FAST_SYNCH": "1", "MLX_A": "--rank=7 =x"},
            formed_at=FakeClock().now(),
        ),
        seats=(
            Seat(node="a", addresses=("10.0.0.1", "10.0.1.1"), rdma=links),
            Seat(node="b", addresses=("10.0.0.2", "10.0.1.2"), rdma=links[::-1]),
        ),
    )
    found = rendezvous("uid", spec.formation, spec.seats)
    order = rank_process.write_order(tmp_path, spec, 1, found)
    argv = rank_process.rank_command(order)
    assert rank_process.parse_order(argv[argv.index(rank_process.FABRIC_MODULE) + 1 :]) == order
    variables = order.variables()
    assert variables["MLX_RANK"] == "1"
    assert variables["MLX_A"] == "--rank=7 =x"
    is_jaccl = backend != "ring"
    assert ("MLX_IBV_DEVICES" in variables) == ("MLX_JACCL_COORDINATOR" in variables) == is_jaccl
    assert ("MLX_JACCL_RING" in variables) == (backend == "jaccl-ring")
    if is_jaccl:
        text = Path(variables["MLX_IBV_DEVICES"]).read_text()
        assert text == '[[null, ["rdma_en5"]], [["rdma_en5"], null]]'


def test_an_order_has_the_variables_that_mlx_reads(tmp_path: Path) -> None:
    order = FabricRankOrder(
        rank=0, size=2, backend="ring", hostfile=tmp_path / "h", sizes=(4,), rounds=1
    )
    assert order.variables() == {"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "h")}
