"""The launch of a rank: flags that the engine parses, and variables and files that MLX reads."""

import asyncio
import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from machinery.clock import SystemClock
from nodeagent.engines import engine_processes, group_launch
from nodeagent.engines.addresses import EngineAddresses
from nodeagent.engines.engine_processes import EngineProcesses, EpochRecords
from nodeagent.engines.health_client import HealthClient
from nodeagent.execute import engine_order
from schemas.deployment import ModelSource
from schemas.formation import GoldenAnswer, rendezvous
from schemas.replica import Replica
from schemas.wire.engine_config import EngineConfig
from tests.support.nodeagent_groups import GOLDEN, group
from tests.support.ports import free_port
from tests.support.values import present
from tests.support.waiting import until, until_async

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
    config = engine_order(replica, Path("/models"), 1, "s3cret").config
    assert config.memory_limit_bytes == replica.spec.ranks[1].memory.total_bytes
    assert EngineConfig.model_validate_json(config.to_json()) == config
    group_config = present(config.group)
    assert (group_config.rank, group_config.world_size, group_config.epoch) == (1, 2, 7)
    assert (group_config.backend, group_config.parallelism) == ("ring", parallelism)
    assert group_config.layers == ((2, 3) if parallelism == "Pipeline" else ())
    formation = present(replica.spec.formation)
    meeting = rendezvous("u1", formation, replica.spec.ranks)
    assert (group_config.host, group_config.port) == meeting.control
    assert "s3cret" not in f"{config.identity.to_argv()} {config!r}"
    assert group_config.timeout_s == 120


@pytest.mark.parametrize(("golden", "seconds"), [(None, 720), (GOLDEN, 120)])
def test_ranks_wait_for_the_reference_that_is_made_first(
    golden: GoldenAnswer | None, seconds: float
) -> None:
    order = engine_order(group("a", "b", fits_single=True, golden=golden), Path("/models"), 1)
    assert order.config.group is not None
    assert order.config.group.timeout_s == seconds


def test_a_ring_has_a_hostfile(tmp_path: Path) -> None:
    order = present(
        group_launch.group_launch(group("a", "b", environment={"MLX_METAL_FAST_SYNCH": "1"}), 1)
    )
    group_launch.write_group_files(order, tmp_path)
    assert group_launch.group_variables(order, tmp_path) == {
        "MLX_METAL_FAST_SYNCH": "1",
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
    order = present(group_launch.group_launch(rdma(group("a", "b", backend=backend)), 0))
    group_launch.write_group_files(order, tmp_path)
    found = group_launch.group_variables(order, tmp_path)
    assert found["MLX_IBV_DEVICES"] == str(tmp_path / "devices.json")
    host, port = order.rendezvous.coordinator
    assert found["MLX_JACCL_COORDINATOR"] == f"{host}:{port}"
    assert ("MLX_JACCL_RING" in found) == (backend == "jaccl-ring")
    matrix = json.loads((tmp_path / "devices.json").read_text())
    assert matrix == [[None, ["rdma_en5", "rdma_en6"]], ["rdma_en3", None]]


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
    for process in EngineProcesses(
        tmp_path, node="b", addresses=EngineAddresses(host=HOST, first=1024)
    ).find():
        engine_processes.kill(process)


async def test_a_rank_is_started_and_found_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what the agent inherited nothing reaches MLX; and its epoch is used up, whatever comes of it."""
    monkeypatch.setenv("JACCL_RANK", "9")
    monkeypatch.setenv("MLX_JACCL_RING", "1")
    monkeypatch.setenv("FLEET_OTHER", "kept")
    ours = EngineProcesses(folder, node="b", addresses=EngineAddresses(host=HOST, first=24_100))
    assert ours.last_epoch("qwen-0", "u1") == 0
    started = ours.start(engine_order(group("a", "b", epoch=3), folder, 1), taken=())
    # In the middle of its exec a process has no environment yet.
    inherited = await until(
        psutil.Process(started.child.record.pid).environ, what="its environment"
    )
    assert inherited["MLX_RANK"] == "1"
    assert "s3cret" not in " ".join([*inherited.values(), *started.child.record.command])
    assert inherited["FLEET_OTHER"] == "kept"
    assert not {"JACCL_RANK", "MLX_JACCL_RING"} & inherited.keys()
    (process,) = EngineProcesses(
        folder, node="b", addresses=EngineAddresses(host=HOST, first=1024)
    ).find()
    assert (process.epoch, process.memory_bytes) == (3, 2**30)
    assert (started.epoch, started.memory_bytes) == (3, 2**30)
    # There is no such model: it ends.
    await until(lambda: not started.child.running(), limit_s=30)
    again = EngineProcesses(folder, node="b", addresses=EngineAddresses(host=HOST, first=1024))
    assert again.last_epoch("qwen-0", "u1") == 3
    assert again.last_epoch("qwen-0", "u2") == 0


CANARY = "canary-of-the-group"
KILLED_AGENT = """
import os, signal, sys
from pathlib import Path
from nodeagent.engines.addresses import EngineAddresses
from nodeagent.engines.engine_processes import EngineProcesses
from nodeagent.execute import engine_order
from schemas.replica import Replica
folder, models, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
replica = Replica.model_validate_json((folder / "replica.json").read_bytes())
for rank, node in enumerate("ab"):
    processes = EngineProcesses(folder / node, node=node, addresses=EngineAddresses(host="127.0.0.1", first=port + rank))
    processes.start(engine_order(replica, models, rank, sys.argv[4]), taken=())
os.kill(os.getpid(), signal.SIGKILL)
"""


def on_this_machine(uid: str, model: str) -> Replica:
    """Return a group of two ranks on the loopback address."""
    replica = group("a", "b", uid=uid)
    seats = [rank.model_copy(update={"addresses": (HOST,)}) for rank in replica.spec.ranks]
    model_source = ModelSource(path=model)
    spec = replica.spec.model_copy(update={"ranks": tuple(seats), "model": model_source})
    return replica.model_copy(update={"spec": spec})


@pytest.mark.ci
async def test_a_group_forms_with_a_secret_that_no_process_shows(
    tmp_path: Path, models_dir: Path
) -> None:
    """Also when its agents are killed as soon as they have started the ranks."""
    uid = secrets.token_hex(8)
    replica = on_this_machine(uid, "tiny")
    (tmp_path / "replica.json").write_text(replica.model_dump_json(by_alias=True))
    agent = [
        sys.executable,
        "-c",
        KILLED_AGENT,
        str(tmp_path),
        str(models_dir),
        str(free_port()),
        CANARY,
    ]
    ended = await asyncio.to_thread(subprocess.run, agent, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    agents = [
        EngineProcesses(tmp_path / n, node=n, addresses=EngineAddresses(host=HOST, first=1024))
        for n in "ab"
    ]
    ranks = [process for agent in agents for process in agent.find()]
    client = HealthClient()
    try:
        assert [rank.epoch for rank in ranks] == [1, 1]

        async def is_ready() -> bool:
            found = await client.ask(ranks[0].address, uid)
            assert all(rank.child.running() for rank in ranks), ranks[0].log.read_text()
            return found is not None and found.state == "Ready"

        await until_async(is_ready, limit_s=60)
        for process in ranks:
            shown = psutil.Process(process.child.record.pid)
            assert CANARY not in " ".join([*shown.cmdline(), *shown.environ().values()])
        files = [path for n in "ab" for path in (tmp_path / n).rglob("*") if path.is_file()]
        assert [str(path) for path in files if CANARY.encode() in path.read_bytes()] == []
    finally:
        await client.close()
        for process in ranks:
            engine_processes.kill(process)


@pytest.mark.parametrize("words", ["", "[]", '{"uid": "u1"}', '{"uid": "u1", "epoch": "x"}'])
def test_a_note_that_cannot_be_read_is_none(tmp_path: Path, words: str) -> None:
    noted = EpochRecords(tmp_path)
    noted.use("qwen-0", "u1", 4)
    assert noted.last("qwen-0", "u1") == 4
    (tmp_path / "qwen-0" / "epoch.json").write_text(words)
    assert noted.last("qwen-0", "u1") == 0
