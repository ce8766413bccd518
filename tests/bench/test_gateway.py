"""The bench of the gateway compares peers round by round, and its load and engine agree on every byte."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.gateway.__main__ import CASES, FIGURES, KINDS, Case, Results, aims
from bench.gateway.load import Engine, counts
from bench.gateway.peers import DIRECT, OURS, Peer
from bench.harness import Spread

ROUTER, PREFIX_ROUTER = "vllm-router p2c", "vllm-router cache"


def results(**cpu_us: Sequence[float]) -> Results:
    """Return results in which each peer took so much processor time, round by round, in every case."""
    names = {"router": ROUTER, "slow": PREFIX_ROUTER}
    return Results(
        {
            (case.name, names.get(name, name)): {
                round_: dict.fromkeys(FIGURES, 900.0) | {"cpu_us": value}
                for round_, value in enumerate(values, start=1)
            }
            for case in CASES
            for name, values in cpu_us.items()
        }
    )


def test_a_ratio_is_the_median_of_rounds_that_both_have() -> None:
    # The machine was busy in the second round, for both; the third has only one of them.
    two = results(ours=(10.0, 40.0, 10.0), router=(20.0, 80.0))
    assert two.compare(KINDS[0], (ROUTER, OURS), "cpu_us") == Spread(2.0, 2.0, 2.0)
    added = two.compare(KINDS[0], (ROUTER, OURS), "cpu_us", lambda first, second: first - second)
    assert added == Spread(25.0, 10.0, 40.0)


def test_aims_compare_with_the_best_router_of_each_case_and_with_nginx() -> None:
    peers = results(ours=(10.0, 10.0), router=(20.0, 17.0), slow=(90.0, 90.0), nginx=(5.0, 4.0))
    by = {aim[0]: aim[1:] for aim in aims(peers, {OURS: 11.0})}
    requests = by["requests_per_cpu_s_over_best_router_fresh_heads"]
    assert requests == (Spread(1.85, 1.7, 2.0), ">=", 0.9, ROUTER)
    prefixes = by["requests_per_cpu_s_over_best_prefix_router_fresh_heads"]
    assert prefixes == (Spread(9.0, 9.0, 9.0), ">=", 1.8, PREFIX_ROUTER)
    assert by["cpu_over_nginx_paced"][0] == Spread(2.25, 2.0, 2.5)
    assert by["added_p50_us_alone"][0].median == 0
    assert {name for name in by if name.startswith("p99")} == {
        f"p99_over_best_router_{case.name}" for case in KINDS
    }
    assert list(aims(results(ours=(10.0,)), {})) == []


@pytest.fixture(scope="module")
def engine(programs: Path) -> Iterator[Engine]:
    engine = Engine(programs, "bench-0")
    with ExitStack() as stack:
        stack.callback(engine.end)
        engine.start()
        yield engine


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_load_gets_every_answer_whole(programs: Path, engine: Engine, case: Case) -> None:
    engine.set(f"pace/{case.pace_us}")
    records = asyncio.run(case.load(Peer(DIRECT, engine.port), 0.05).run(programs))
    assert set(counts(records)) == {"ok"}
    assert len(records) >= case.connections
