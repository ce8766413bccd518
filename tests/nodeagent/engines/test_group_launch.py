"""The launch of a rank: flags that the engine parses, and variables and files that MLX reads."""

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine import flags
from machinery.clock import SystemClock
from nodeagent.engines import engine_processes, group_launch
from nodeagent.engines.engine_processes import EngineProcesses, EpochRecords
from nodeagent.execute import engine_order
from schemas.formation import GoldenAnswer, rendezvous
from schemas.replica import Replica
from tests.support.nodeagent_groups import GOLDEN, group
from tests.support.waiting import until

HOST = "127.0.0.1"
CLOCK = SystemClock()


def rdma(replica: Replica) -> Replica:
    """Return the group with devices: two cables between its Macs."""
    devices = (((), ("rdma_en5", "rdma_en6")), (("rdma_en3",), ()))
    ranks = tuple(
        rank.model_copy(update={"rdma": row})
        for rank, row in zip(replica.spec.ranks, devices, strict=True)
    )
    return replica.model_copy(update={"spec": replica.spec.model_copy(update={"ranks": ranks})})


@pytest.mark.parametrize("parallelism", ["Tensor", "Pipeline"])
def test_a_rank_gets_its_place(parallelism: str) -> None:
    replica = group("a", "b", epoch=7, parallelism=parallelism)
    order = engine_order(replica, Path("/models"), 1)
    assert order.memory_limit_bytes == replica.spec.ranks[1].memory.total_bytes
    words = engine_processes.engine_command(order, node="b", host=HOST, port=4100)
    found = flags.parse(words[3:], secret="s3cret").group
    assert found is not None
    assert (found.rank, found.world_size, found.epoch) == (1, 2, 7)
    assert (found.backend, found.parallelism) == ("ring", parallelism)
    assert found.layers == ((2, 3) if parallelism == "Pipeline" else ())
    formation = replica.spec.formation
    assert formation is not None
    meeting = rendezvous("u1", formation, replica.spec.ranks)
    assert (found.host, found.port) == meeting.control
    assert "s3cret" not in words
    assert found.timeout_s == 120


@pytest.mark.parametrize(("golden", "seconds"), [(None, 720), (GOLDEN, 120)])
def test_ranks_wait_for_the_reference_that_is_made_first(
    golden: GoldenAnswer | None, seconds: float
) -> None:
    order = engine_order(group("a", "b", fits_single=True, golden=golden), Path("/models"), 1)
    words = engine_processes.engine_command(order, node="b", host=HOST, port=4100)
    found = flags.parse(words[3:], secret="s3cret").group
    assert found is not None
    assert found.timeout_s == seconds


def test_a_ring_has_a_hostfile(tmp_path: Path) -> None:
    order = group_launch.group_order(group("a", "b", environment={"MLX_METAL_FAST_SYNCH": "1"}), 1)
    assert order is not None
    group_launch.write_group_files(order, tmp_path)
    assert group_launch.group_variables(order, tmp_path) == {
        "MLX_METAL_FAST_SYNCH": "1",
        "MLX_FLEET_GROUP_SECRET": "s3cret",
        "MLX_RANK": "1",
        "MLX_HOSTFILE": str(tmp_path / "hosts.json"),
    }
    hosts = json.loads((tmp_path / "hosts.json").read_text())
    assert [[address.rpartition(":")[0] for address in rank] for rank in hosts] == [
        ["10.0.0.1"],
        ["10.0.0.2"],
    ]


@pytest.mark.parametrize("backend", ["jaccl", "jaccl-ring"])
def test_jaccl_has_a_matrix_of_devices(tmp_path: Path, backend: str) -> None:
    order = group_launch.group_order(rdma(group("a", "b", backend=backend)), 0)
    assert order is not None
    group_launch.write_group_files(order, tmp_path)
    found = group_launch.group_variables(order, tmp_path)
    assert found["MLX_IBV_DEVICES"] == str(tmp_path / "devices.json")
    host, port = order.rendezvous.coordinator
    assert found["MLX_JACCL_COORDINATOR"] == f"{host}:{port}"
    assert ("MLX_JACCL_RING" in found) == (backend == "jaccl-ring")
    matrix = json.loads((tmp_path / "devices.json").read_text())
    assert matrix == [[None, ["rdma_en5", "rdma_en6"]], ["rdma_en3", None]]


def test_which_rank_a_node_has() -> None:
    replica = group("a", "b")
    assert [group_launch.rank_of_node(replica, node) for node in "abc"] == [0, 1, None]
    assert group_launch.wanted_epoch(replica) == 1


def test_a_rank_without_an_address_is_refused() -> None:
    replica = group("a", "b")
    seat = replica.spec.ranks[1].model_copy(update={"addresses": ()})
    ranks = (replica.spec.ranks[0], seat)
    spec = replica.spec.model_copy(update={"ranks": ranks})
    with pytest.raises(ValueError, match="has no address"):
        engine_order(replica.model_copy(update={"spec": spec}), Path("/models"), 0)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for found in EngineProcesses(tmp_path, node="b", host=HOST, first_port=1024).find():
        engine_processes.kill(found)


async def test_a_rank_is_started_and_found_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what the agent inherited nothing reaches MLX; and its epoch is used up, whatever comes of it."""
    monkeypatch.setenv("JACCL_RANK", "9")
    monkeypatch.setenv("MLX_JACCL_RING", "1")
    monkeypatch.setenv("FLEET_OTHER", "kept")
    ours = EngineProcesses(folder, node="b", host=HOST, first_port=24_100)
    assert ours.last_epoch("qwen-0", "u1") == 0
    started = ours.start(engine_order(group("a", "b", epoch=3), folder, 1), taken=())
    # In the middle of its exec a process has no environment yet.
    inherited = await until(
        psutil.Process(started.child.record.pid).environ, what="its environment"
    )
    assert inherited["MLX_RANK"] == "1"
    assert inherited["MLX_FLEET_GROUP_SECRET"] == "s3cret"
    assert inherited["FLEET_OTHER"] == "kept"
    assert not {"JACCL_RANK", "MLX_JACCL_RING"} & inherited.keys()
    (found,) = EngineProcesses(folder, node="b", host=HOST, first_port=1024).find()
    assert (found.epoch, found.memory_bytes) == (3, 2**30)
    assert (started.epoch, started.memory_bytes) == (3, 2**30)
    # There is no such model: it ends.
    await until(lambda: not started.child.running(), limit_s=30)
    again = EngineProcesses(folder, node="b", host=HOST, first_port=1024)
    assert again.last_epoch("qwen-0", "u1") == 3
    assert again.last_epoch("qwen-0", "u2") == 0


@pytest.mark.parametrize("words", ["", "[]", '{"uid": "u1"}', '{"uid": "u1", "epoch": "x"}'])
def test_a_note_that_cannot_be_read_is_none(tmp_path: Path, words: str) -> None:
    noted = EpochRecords(tmp_path)
    noted.use("qwen-0", "u1", 4)
    assert noted.last("qwen-0", "u1") == 4
    (tmp_path / "qwen-0" / "epoch.json").write_text(words)
    assert noted.last("qwen-0", "u1") == 0
