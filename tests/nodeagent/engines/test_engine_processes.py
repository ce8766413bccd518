"""Engine processes: started, found again and stopped, with real processes and a tiny model."""

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from machinery import processes, unix_sockets
from machinery.clock import SystemClock
from nodeagent.engines import engine_processes
from nodeagent.engines.addresses import EngineAddresses, make_socket_folder
from nodeagent.engines.engine_processes import EngineOrder, EngineProcess, EngineProcesses
from nodeagent.engines.health_client import HealthClient
from nodeagent.execute import engine_order
from schemas.deployment import DraftModel, ModelSource, NamedAdapter
from schemas.guesses import MtpGuesses, NgramGuesses
from schemas.kv_cache import KvCache
from schemas.meta import ObjectMeta
from schemas.replica import MemoryProof, RankAssignment, Replica, ReplicaSpec
from schemas.sampling import Sampling
from schemas.vision import Vision
from schemas.wire.engine_address import EngineAddress
from schemas.wire.engine_config import EngineConfig
from tests.support.ports import free_port
from tests.support.waiting import until, until_async

CLOCK = SystemClock()
HOST = "127.0.0.1"


@pytest.fixture
def first_port() -> int:
    """Return a port from which on a few are free."""
    return free_port()


@pytest.fixture
async def client() -> AsyncIterator[HealthClient]:
    made = HealthClient()
    yield made
    await made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a state folder; no engine below it outlives the test."""
    yield tmp_path
    for process in agent(tmp_path, 1024).find():
        engine_processes.kill(process)


def ports(first: int, host: str = HOST) -> EngineAddresses:
    return EngineAddresses(host=host, first=first)


def agent(folder: Path, first_port: int, sockets: Path | None = None) -> EngineProcesses:
    addresses = EngineAddresses(host=HOST, first=first_port, sockets=sockets)
    return EngineProcesses(folder, node="a", addresses=addresses)


def order(models_dir: Path) -> EngineOrder:
    return EngineOrder(
        config=EngineConfig(
            model_dir=models_dir / "tiny",
            replica="tiny-0",
            replica_uid="u1",
            served_names=("tiny", "fast"),
            context_length=64,
            memory_limit_bytes=2**30,
        )
    )


def replica_of(model: ModelSource, **fields: Any) -> Replica:
    proof = MemoryProof(weights_bytes=7, kv_cache_bytes=0, activation_bytes=0, overhead_bytes=0)
    spec = ReplicaSpec(
        deployment="tiny",
        template="t",
        model=model,
        served_names=("tiny", "org/m"),
        context_length=64,
        concurrency=2,
        ranks=(RankAssignment(node="a", memory=proof),),
    )
    return Replica(
        metadata=ObjectMeta(name="tiny-0", uid="u1"), spec=spec.model_copy(update=fields)
    )


BASE = EngineConfig(
    model_dir=Path("/models/tiny"),
    replica="tiny-0",
    replica_uid="u1",
    node="a",
    served_names=("tiny", "org/m"),
    context_length=64,
    concurrency=2,
    memory_limit_bytes=7,
    draft_tokens=0,
)
SPEC: dict[str, Any] = {
    "queue_depth": 3,
    "sampling": Sampling(temperature=0.5),
    "unknown_parameters": "Refuse",
    "performance": "Always",
    "kv_cache": KvCache(tokens=99, bits=4, prefix_bytes="1Ki", disk_bytes="2Ki"),
}
ADAPTERS = (NamedAdapter(name="law", path="law"), NamedAdapter(name="p", path="/x/poems"))


@pytest.mark.parametrize(
    ("replica", "changes"),
    [
        pytest.param(replica_of(ModelSource(path="tiny")), {}, id="least"),
        pytest.param(
            replica_of(
                ModelSource(
                    path="tiny", adapter="law", draft=DraftModel(path="/m/small", tokens=4)
                ),
                **SPEC,
            ),
            {
                **SPEC,
                "prefix_disk_dir": Path("/prefixes/tiny"),
                "adapter": Path("/models/law"),
                "draft_model": Path("/m/small"),
                "draft_tokens": 4,
            },
            id="most",
        ),
        pytest.param(
            replica_of(ModelSource(path="tiny", ngram=NgramGuesses(tokens=6))),
            {"ngram_tokens": 6},
            id="ngram",
        ),
        pytest.param(
            replica_of(ModelSource(path="tiny", mtp=MtpGuesses(tokens=2))),
            {"mtp_tokens": 2},
            id="mtp",
        ),
        pytest.param(
            replica_of(ModelSource(path="tiny", vision=Vision(max_images=2))),
            {"vision": Vision(max_images=2)},
            id="vision",
        ),
        pytest.param(
            replica_of(ModelSource(path="tiny", adapters=ADAPTERS)),
            {
                "adapters": {
                    "tiny:law": Path("/models/law"),
                    "tiny:p": Path("/x/poems"),
                    "org/m:law": Path("/models/law"),
                    "org/m:p": Path("/x/poems"),
                }
            },
            id="adapters",
        ),
    ],
)
def test_every_field_of_a_replica_reaches_its_engine(
    replica: Replica, changes: dict[str, Any]
) -> None:
    config = engine_processes.place(
        engine_order(replica, Path("/models")),
        node="a",
        address=BASE.address,
        prefixes=Path("/prefixes"),
    )
    assert config == BASE.model_copy(update=changes)
    assert EngineConfig.model_validate_json(config.to_json()) == config


async def ready(client: HealthClient, engine: EngineProcess) -> None:
    async def says_so() -> bool:
        health = await client.ask(engine.address, engine.replica_uid)
        return health is not None and health.state == "Ready"

    await until_async(says_so, limit_s=90, what="the engine is ready")


@pytest.mark.mlx
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "is_tcp",
    [pytest.param(True, marks=pytest.mark.ci, id="port"), pytest.param(False, id="socket")],
)
async def test_the_life_of_an_engine(
    folder: Path,
    short_folder: Path,
    models_dir: Path,
    first_port: int,
    client: HealthClient,
    is_tcp: bool,
) -> None:
    ours = agent(folder, first_port, sockets=None if is_tcp else short_folder)
    ours.variables = {"OTEL_TRACES_EXPORTER": "none"}
    started = ours.start(order(models_dir), taken=())
    process = psutil.Process(started.child.record.pid)
    # Before its program is loaded, it has the environment of this process.
    await until(lambda: process.environ().get("OTEL_TRACES_EXPORTER") == "none")
    path = short_folder / f"{first_port}.sock"
    at = EngineAddress(HOST, first_port) if is_tcp else EngineAddress.at_socket(path)
    assert started.address == at
    await ready(client, started)
    assert await client.probe(started.address, "fast") == ""
    assert "the first token failed" in await client.probe(started.address, "unheard-of")
    assert await client.ask(started.address, "of another replica") is None

    # Its next agent may have other flags.
    (engine_process,) = agent(folder, 9, sockets=short_folder if is_tcp else None).find()
    assert engine_process.child.record.pid == started.child.record.pid
    assert (
        engine_process.replica,
        engine_process.replica_uid,
        engine_process.served_name,
        engine_process.address,
    ) == ("tiny-0", "u1", "tiny", at)
    assert engine_process.log == started.log
    assert engine_process.child.running()
    assert agent(folder / "other", 9).find() == []
    assert agent(folder.parent, 9).find() == []

    assert await engine_processes.stop_all(folder, CLOCK, grace_s=10) == 1
    assert not engine_process.child.running()
    # Its first thread has ended; the kernel tells the parent when the last one has.
    await until(lambda: not started.child.running(), what="the last thread's end")
    assert started.child.exit_code() == 0
    assert engine_process.child.exit_code() is None
    assert agent(folder, 9).find() == []
    assert await client.ask(started.address, "u1") is None
    assert "the first token failed" in await client.probe(started.address, "tiny")
    assert not path.exists()


@pytest.mark.ci
@pytest.mark.timeout(180)
async def test_a_port_that_is_taken_meanwhile(
    folder: Path, models_dir: Path, first_port: int
) -> None:
    ours = agent(folder, first_port)
    first = ours.start(order(models_dir), taken=())
    with closing(socket.socket()) as thief:
        thief.bind((HOST, first_port))
        thief.listen()
        await until(lambda: not first.child.running(), limit_s=20)
        assert first.child.exit_code() == 3
        words = processes.last_lines(first.log, 1)
        assert words.startswith(f"engine: port {first_port} is in use on {HOST}")
        assert ports(first_port).free(()).port > first_port
    # The thief is gone; the engine that failed still counts as one that holds the port.
    second = ours.start(order(models_dir), taken=(first.address,))
    assert second.address.port > first_port
    engine_processes.kill(second)
    await until(lambda: not second.child.running())


async def test_an_engine_that_does_not_listen_is_killed(folder: Path, first_port: int) -> None:
    ours = agent(folder, first_port)
    started = ours.start(order(folder), taken=())
    os.kill(started.child.record.pid, signal.SIGSTOP)
    while (
        not started.child.running()
    ):  # without a model it ends, on a busy machine before it is stopped
        started = ours.start(order(folder), taken=())
        os.kill(started.child.record.pid, signal.SIGSTOP)
    assert await engine_processes.stop_all(folder, CLOCK, grace_s=0.2) == 1
    assert started.child.exit_code() in (-signal.SIGKILL, -signal.SIGTERM)  # kernels differ


_START_WITH_FEW_FILES = """
import resource, sys
from pathlib import Path
from tests.nodeagent.engines.test_engine_processes import agent, order
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
folder = Path(sys.argv[1])
try:
    agent(folder, 4100).start(order(folder), taken=())
except OSError as error:
    print(error)
"""


@pytest.mark.ci
def test_an_engine_is_not_started_with_a_limit_of_open_files_that_it_cannot_live_with(
    folder: Path,
) -> None:
    argv = [sys.executable, "-c", _START_WITH_FEW_FILES, str(folder)]
    ended = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
    assert ended.stdout.startswith("the agent may open 64 files at most, and an engine needs 4096;")
    assert not (folder / "tiny-0").exists()


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1: .*an address of this Mac"):
        ports(4100, "192.0.2.1").free(())


def test_no_port_is_left() -> None:
    with pytest.raises(OSError, match=r"ports 4100 to 4199 on 127\.0\.0\.1 are all in use"):
        ports(4100).free([EngineAddress(HOST, port) for port in range(4100, 4200)])


def test_sockets_are_given_out_like_ports(short_folder: Path) -> None:
    sockets = EngineAddresses(host=HOST, first=4100, sockets=short_folder)
    listener, _ = unix_sockets.listen(short_folder / "4100.sock")
    with listener:
        taken = [EngineAddress.at_socket(short_folder / "4101.sock")]
        assert sockets.free(taken).url == f"unix:{short_folder}/4102.sock"
    # The process ended without removing its file.
    assert sockets.free(()).url == f"unix:{short_folder}/4100.sock"


def test_the_folder_of_a_node_is_for_its_user_only_and_has_a_short_path(short_folder: Path) -> None:
    made = make_socket_folder(short_folder / "s", "mac-1")
    assert made == short_folder / "s" / "mac-1"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (made.parent, made)] == [0o700, 0o700]
    with pytest.raises(ValueError, match="more than 103 bytes"):
        make_socket_folder(short_folder / ("deep" * 20), "mac-1")
    assert not (short_folder / ("deep" * 20)).exists()
