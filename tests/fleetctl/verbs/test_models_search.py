"""`fleetctl models search`: the shipped list with the memory that each model needs."""

import json

from tests.support.fleetctl_runner import run_fleetctl


async def test_a_search_shows_sizes_and_the_smallest_mac() -> None:
    done = await run_fleetctl("models", "search", "qwen3-8b", "4bit")
    assert done.code == 0
    title, row = done.out.splitlines()
    assert title.split()[0] == "NAME"
    assert row.split()[:4] == ["mlx-community/Qwen3-8B-4bit", "8.2", "billion", "4"]
    assert "the hub was not asked" in done.err
    tree = json.loads((await run_fleetctl("models", "search", "70b", "8bit", "-o", "json")).out)
    (model,) = tree["models"]
    assert {one["memoryGigabytes"] for one in model["macs"] if not one["fits"]} >= {8, 64}
    assert model["memoryBytes"] > model["bytes"] > 70 * 10**9


async def test_a_search_without_a_result_says_what_to_do() -> None:
    done = await run_fleetctl("models", "search", "nothing-has-this")
    assert (done.code, done.out) == (0, "")
    assert "`fleetctl models fit ORGANISATION/NAME`" in done.err
