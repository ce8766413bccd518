"""The README's first command, on a data folder of the test's own."""

from pathlib import Path

import pytest

from tests.support.fleet import fleetctl, free_port


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
        "waiting until the deployment is Available",
        "shutting down",
    ]
    assert "modeldeployment/smollm2 created" in lines
    assert "The capital of France is Paris." in lines
    tables = [line.split() for line in lines]
    assert ["node-1", "Ready"] in [words[:2] for words in tables]
    assert ["node-2", "Ready"] in [words[:2] for words in tables]
    assert ["smollm2", "2/2", "True"] in [words[:3] for words in tables]
