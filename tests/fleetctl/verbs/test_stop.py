"""The verb `fleetctl stop`: the engines of this Mac, without etcd. tests/nodeagent/test_agent_survival.py has engines."""

from pathlib import Path

import pytest

from nodeagent.engines.stop_order import StopOrder
from tests.support.fleetctl_runner import run_fleetctl


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ((), "give --local"),
        (("qwen",), "`fleetctl scale md/NAME --replicas=0` unloads a model"),
        (("--all",), "--all is not supported: an agent takes no orders from other machines"),
    ],
)
async def test_other_ways_to_stop_are_named(words: tuple[str, ...], refusal: str) -> None:
    done = await run_fleetctl("stop", *words)
    assert done.code == 2
    assert refusal in done.err


async def test_an_order_stays_until_it_is_undone(tmp_path: Path) -> None:
    order, words = StopOrder(tmp_path), ("stop", "--local", "--state-dir", str(tmp_path))
    assert order.refusal() == ""
    for _ in range(2):
        done = await run_fleetctl(*words)
        assert (done.code, done.out) == (
            0,
            f"{tmp_path}: 0 engines ended, none starts until --undo\n",
        )
        assert "engines are stopped on this Mac since 20" in order.refusal()
    assert (await run_fleetctl(*words, "--undo")).out == f"{tmp_path}: engines may start again\n"
    assert (await run_fleetctl(*words, "--undo")).out == f"{tmp_path}: not stopped\n"
    assert order.refusal() == ""


@pytest.mark.parametrize("content", ["", "{}", '{"at": 1}', '{"at": "now"}'])
def test_a_damaged_order_holds(tmp_path: Path, content: str) -> None:
    (tmp_path / "stopped.json").write_text(content)
    assert StopOrder(tmp_path).refusal().startswith("engines are stopped on this Mac;")


async def test_a_mac_without_agents_is_told_how_to_name_one(tmp_path: Path) -> None:
    done = await run_fleetctl("stop", "--local", "--data-dir", str(tmp_path))
    assert done.code == 1
    assert "Name the folder with --state-dir" in done.err
