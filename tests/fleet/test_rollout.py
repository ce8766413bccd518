"""Rollouts, drains and deletions under load, with real engines: no request is dropped, and the fleet ends as declared."""

from pathlib import Path

import pytest

from tests.support.fleet import Fleet, model_deployment, running_fleet
from tests.support.fleet_load import replicas, rolled_out, under_load
from tests.support.waiting import until_async

pytestmark = pytest.mark.full


def manifest(context: int) -> str:
    return model_deployment(replicas=2, contextLength=context, minAvailable=1)


# Without a pause the clients take all that the machine has.
@pytest.mark.parametrize("pause_s", [0.3, pytest.param(0.0, marks=pytest.mark.soak)])
@pytest.mark.fleet
@pytest.mark.timeout(300)
async def test_nothing_is_dropped_by_a_rollout_a_drain_or_a_way_back(
    tmp_path: Path, models_dir: Path, pause_s: float
) -> None:
    async with running_fleet(tmp_path, models_dir, nodes=2) as fleet:
        await fleet.applied(manifest(512))
        await rolled_out(fleet)
        await fleet.routed("tiny", 2)
        before = await replicas(fleet)
        async with under_load(fleet, pause_s):
            await fleet.applied(manifest(768))
            await rolled_out(fleet)
            assert not before.keys() & (await replicas(fleet)).keys()
            drained = await fleet.ctl("drain", "node-1", "--timeout=60s", limit_s=90)
            assert drained.code == 0, drained.err + fleet.words()
            assert set((await replicas(fleet)).values()) == {"node-2"}
            undone = await fleet.ctl("rollout", "undo", "md/tiny")
            assert undone.code == 0, undone.err
            await rolled_out(fleet)
        history = await fleet.ctl("rollout", "history", "md/tiny")
        assert [line.lstrip("* ").split()[0] for line in history.out.splitlines()[-2:]] == [
            "2",
            "3",
        ]


@pytest.mark.fleet
@pytest.mark.timeout(300)
async def test_without_room_for_one_more_replicas_are_replaced_in_place(
    tmp_path: Path, models_dir: Path
) -> None:
    async with running_fleet(tmp_path, models_dir, nodes=2, memory="1Gi") as fleet:
        await fleet.applied(manifest(512))
        await rolled_out(fleet)
        await fleet.routed("tiny", 2)
        async with under_load(fleet):
            await fleet.applied(manifest(768))
            await rolled_out(fleet)
        assert set((await replicas(fleet)).values()) == {"node-1", "node-2"}
        done = await fleet.ctl("get", "events")
        assert "OutdatedInPlace" in done.out
        await left_running(fleet)


async def left_running(fleet: Fleet) -> None:
    """A deployment goes and comes again; its engines never notice."""
    engines = fleet.engine_pids("node-1") | fleet.engine_pids("node-2")
    done = await fleet.ctl("delete", "md/tiny", "--cascade=orphan")
    assert done.code == 0, done.err
    await fleet.applied(manifest(768))
    await rolled_out(fleet)
    assert fleet.engine_pids("node-1") | fleet.engine_pids("node-2") == engines

    async def is_replaced() -> bool:
        return len((await replicas(fleet)).keys() - before.keys()) == 1

    # One that is deleted by hand is made anew.
    before = await replicas(fleet)
    named = await fleet.ctl("get", "replicas", "-o", "name")
    done = await fleet.ctl("delete", named.out.splitlines()[0])
    assert done.code == 0, done.err
    await until_async(is_replaced, limit_s=60, what="another replica")
