"""The bench of the gateway compares peers round by round, and its load, engine and floor agree on every byte."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gateway import aims, loading, peers_install
from bench.gateway.aims import OURS
from bench.gateway.figures import DIRECT, Burst, Results, Spread, of_cpu, tables
from bench.gateway.parts import Engine, Programs, answers, cpu_s
from bench.gateway.peers import Peer
from bench.gateway.workloads import ALONE, CASES, KINDS, PACED, STREAM, Case
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
PLAIN = Burst(
    rate=1000.0, p50_us=100.0, p99_us=900.0, first_us=50.0, cpu_us=30.0, busy=0.5, failed=0
)


def results(**cpu_us: Sequence[float]) -> Results:
    """Return results in which each peer took so much processor time, round by round, in every case."""
    routers = {"router", "slow"}
    found = Results([Peer(name, 0, is_llm_router=name in routers) for name in cpu_us])
    for peer in found.peers:
        for case in CASES:
            for round_, value in enumerate(cpu_us[peer.name], start=1):
                found.add(case, peer, round_, replace(PLAIN, cpu_us=value))
    return found


def test_a_ratio_is_the_median_of_rounds_that_both_have() -> None:
    # The machine was busy in the second round, for both; the third has only one of them.
    found = results(ours=(10.0, 40.0, 10.0), router=(20.0, 80.0))
    assert found.ratio(KINDS[0], "router", OURS, of_cpu) == Spread(2.0, 2.0, 2.0)
    assert found.difference(KINDS[0], "router", OURS, of_cpu) == Spread(25.0, 10.0, 40.0)


def test_aims_compare_with_the_best_router_of_each_case_and_with_nginx() -> None:
    found = results(
        ours=(10.0, 10.0), router=(20.0, 17.0), slow=(90.0, 90.0), nginx=(5.0, 4.0), floor=(5.0,)
    )
    by = {aim.name: aim for aim in aims.aims(found, {OURS: 11.0})}
    requests = by["requests_per_cpu_s_over_best_router_fresh_heads"]
    assert requests.figures == {
        "value": 1.85,
        "low": 1.7,
        "high": 2.0,
        "aim": ">= 1.4",
        "is_met": True,
        "beside": "router",
    }
    assert by["cpu_over_nginx_paced"].figures["is_met"] is False
    assert by["kib_per_idle_stream"].is_met
    assert by["added_p50_us_alone"].value == 0
    assert {name for name in by if name.startswith("p99")} == {
        f"p99_over_best_router_{case.name}" for case in KINDS
    }
    assert aims.over_floor(found)[OURS]["both"] == 2.0


def test_aims_that_need_a_peer_that_is_not_there_are_left_out() -> None:
    assert [aim.name for aim in aims.aims(results(ours=(10.0,)), {})] == []


def test_the_tables_name_every_peer_and_have_its_spread() -> None:
    found = results(ours=(10.0, 12.0, 11.0), direct=(1e-6,), router=(20.0,))
    text = tables(found, {OURS: 11.04})
    assert "11.0 (10.0-12.0)" in text
    assert {line.split()[0] for line in text.splitlines() if line} >= {OURS, DIRECT, "router"}


@pytest.mark.ci
def test_a_peer_that_cannot_be_installed_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers_install, "FOLDER", tmp_path)
    monkeypatch.setattr(peers_install, "_PACKAGES", {"vllm-router": str(tmp_path / "no-wheel.whl")})
    failed = peers_install.install(["floor", "vllm-router p2c", "vllm-router cache"])
    assert list(failed) == ["vllm-router p2c", "vllm-router cache"]
    assert "no-wheel.whl" in failed["vllm-router p2c"]
    assert "vllm-router p2c: not measured: " in capsys.readouterr().out
    assert not (tmp_path / "vllm-router" / "ready").exists()


_CHILD = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); time.sleep(60)"
_PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_CHILD!r}])"


def test_the_processor_time_of_a_process_tree_has_its_children() -> None:
    command = [sys.executable, "-c", _PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            assert parent.stdout is not None
            parent.stdout.readline()
            assert cpu_s(parent.pid) >= 0.5
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def engine(programs: Programs) -> Iterator[Engine]:
    engine = Engine(programs, "bench-0", free_port())
    engine.start()
    yield engine
    engine.end()


@pytest.fixture(scope="module")
def floor(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port, log = free_port(), tmp_path_factory.mktemp("floor") / "log"
    command = (sys.executable, "-m", "bench.gateway.floor", str(port), str(engine.port))
    with log.open("wb") as output, subprocess.Popen(command, cwd=ROOT, stderr=output) as process:
        asyncio.run(answers(port, "/health", log))
        yield port
        process.kill()


@pytest.mark.parametrize("case", [*KINDS, ALONE, STREAM, PACED], ids=lambda case: case.name)
def test_the_load_gets_every_answer_whole_through_the_floor(
    programs: Programs, engine: Engine, floor: int, case: Case
) -> None:
    engine.set(f"pace/{case.pace_us}")
    load = case.load(Peer("floor", floor), 0.05)
    records = asyncio.run(loading.run(programs, load))
    assert set(loading.counts(records)) == {"ok"}
    assert len(records) >= case.connections
