"""Properties of groups: all ranks or none, no memory assigned twice, no needless writes."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.deployments.plan import plan
from reconciler.placement.table import NodeTable
from tests.support.reconciler_group_worlds import World
from tests.support.sampling import samples

seeds = st.integers(0, 2**32)


@settings(max_examples=samples(40), deadline=None)
@given(seeds, st.integers(1, 12))
def test_no_group_is_ever_half_assigned_nor_memory_given_twice(seed: int, steps: int) -> None:
    world = World(random.Random(seed))
    for _ in range(steps):
        world.step()
        world.check()
        world.agents_act(ends=0.3)
        world.disturb()
        world.pass_time(world.dice.choice([1, 10, 61]))
    world.step()
    world.check()


@settings(max_examples=samples(25), deadline=None)
@given(seeds, st.integers(0, 6))
def test_a_repeated_plan_writes_nothing(seed: int, steps: int) -> None:
    world = World(random.Random(seed))
    for _ in range(steps):
        world.step()
        world.agents_act(ends=0.3)
        world.disturb()
        world.pass_time(10)
    for _ in range(60):
        decided = world.step()
        world.check()
        world.agents_act()
        world.pass_time(61)
        # Books are not kept here: nothing saves revisions.
        if not [action for action in decided.actions if "Revision" not in type(action).__name__]:
            break
    else:
        raise AssertionError("the plan does not settle")
    view = world.observe()
    assert plan(view) == plan(view)
    shuffled = replace(
        view,
        table=NodeTable(tuple(reversed(view.table.nodes))),
        replicas=tuple(reversed(view.replicas)),
    )
    assert set(plan(shuffled).actions) == set(plan(view).actions)
    again = [action for action in plan(view).actions if "Revision" not in type(action).__name__]
    assert again == []


@settings(max_examples=samples(10), deadline=None)
@given(seeds)
def test_a_crash_loop_slows_down_and_goes_on(seed: int) -> None:
    """An epoch that never serves begins again after minutes and not before, with any fallback."""
    world = World(random.Random(seed))

    def pass_minutes(number: int) -> dict[str, int]:
        for _ in range(number):
            world.step()
            world.agents_act(ends=1.0)
            world.pass_time(61)
        return {
            name: one.spec.formation.epoch
            for name, one in world.replicas.items()
            if one.spec.formation is not None
        }

    before = pass_minutes(40)
    after = pass_minutes(40)
    assert set(after) == set(before)
    # 40 minutes hold 16 of the shortest delays, 2.5 minutes; the longest is 5, and a plan is made once a minute.
    assert all(5 <= after[name] - before[name] <= 17 for name in after)
