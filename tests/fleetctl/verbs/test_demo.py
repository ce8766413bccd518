"""The verb `fleetctl demo`, the README's first command, in a separate data folder."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from tests.support.fleet import engine_port, fleetctl
from tests.support.ports import free_port

MODEL = "SmolLM2-135M-Instruct"


@pytest.mark.ci
@pytest.mark.fleet
@pytest.mark.mlx
@pytest.mark.timeout(400)
async def test_demo_once(tmp_path: Path) -> None:
    where = ("--data-dir", str(tmp_path / "demo"), "--port", str(free_port()))
    done = await fleetctl("demo", "--once", *where, limit_s=380)
    assert done.code == 0, done.out + done.err
    lines = done.out.splitlines()
    steps = [line for line in lines if ": done in " in line]
    assert [step.split(":")[0].split(" (")[0] for step in steps] == [
        "preparing the model SmolLM2-135M-Instruct",
        "starting etcd, a reconciler, two node agents and a gateway",
        "shutting down",
    ]
    assert "modeldeployment/smollm2 created" in lines
    assert str(tmp_path / "demo" / "models" / MODEL) not in lines  # for scripts
    assert "The capital of France is Paris." in lines
    tables = [line.split() for line in lines]
    assert ["node-1", "Ready"] in [words[:2] for words in tables]
    assert ["node-2", "Ready"] in [words[:2] for words in tables]
    assert ["smollm2", "2/2", "True"] in [words[:3] for words in tables]


@pytest.mark.full
@pytest.mark.fleet
@pytest.mark.mlx
@pytest.mark.timeout(300)
async def test_a_failed_demo_does_not_stop_an_existing_fleet(tmp_path: Path, smollm2: Path) -> None:
    folder, port = tmp_path / "demo", str(free_port())
    (folder / "models").mkdir(parents=True)
    (folder / "models" / MODEL).symlink_to(smollm2 / MODEL)
    where = ("--data-dir", str(folder))
    # Nothing fits on a node this small, so the demo waits until it is interrupted.
    small = ("--node-memory", "100Mi", "--engine-port", str(engine_port()))
    started = await fleetctl("up", "--detach", *where, "--port", port, *small, limit_s=120)
    assert started.code == 0, started.err
    try:
        demo = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fleetctl", "demo", *where, "--port", port),
            stderr=asyncio.subprocess.PIPE,
        )
        assert demo.stderr is not None
        async for line in demo.stderr:
            if b"nodes fit" in line:
                break
        demo.send_signal(signal.SIGINT)
        assert await demo.wait() != 0
        nodes = await fleetctl("wait", "node/node-1", "--for=condition=Ready", *where)
        assert nodes.code == 0, nodes.err
    finally:
        down = await fleetctl("down", *where, limit_s=120)
    assert down.out == "stopped\n"
