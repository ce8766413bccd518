"""`fleetctl discover`: a list of what is suggested, as a table and as JSON."""

import json
from pathlib import Path

from tests.support.fleetctl_runner import run_fleetctl


async def test_seeds_are_listed_as_a_table_and_as_json(tmp_path: Path) -> None:
    file = tmp_path / "seeds.yaml"
    file.write_text('seeds: [control-1, "[fd00::20]:4003"]\n')
    words = ("discover", "--source", "seeds", "--seeds", str(file))
    table = await run_fleetctl(*words)
    assert (table.code, table.err) == (0, "")
    assert [line.split() for line in table.out.splitlines()] == [
        ["ROLE", "NAME", "ADDRESS", "FLEET", "SOURCE", "AGE", "NOTE"],
        ["control", "control-1", "control-1:4002", "seeds"],
        ["control", "fd00::20", "[fd00::20]:4003", "seeds"],
    ]
    items = json.loads((await run_fleetctl(*words, "-o", "json")).out)["items"]
    assert items[1]["spec"]["host"] == "fd00::20"
    assert items[1]["spec"]["port"] == 4003


async def test_a_network_that_says_nothing_is_explained() -> None:
    done = await run_fleetctl("discover", "--source", "seeds", "--timeout", "0.1")
    assert (done.code, done.out) == (0, "")
    assert "Nothing was heard in 0.1 s" in done.err
    assert "fleetctl join TOKEN HOST:4002" in done.err
