"""The file with seeds."""

from pathlib import Path

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.discovery.seeds import StaticSeeds, read_seeds
from fleetctl.fleets.join_client import JoinAddress


def write(folder: Path, text: str) -> Path:
    path = folder / "seeds.yaml"
    path.write_text(text)
    return path


async def test_names_and_both_kinds_of_addresses_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path, 'seeds: [control-1, "192.168.7.20:4003", "[fd00::20]:4002", control-1]\n'
    )
    addresses = read_seeds(path)
    assert addresses == (
        JoinAddress("control-1", 4002),
        JoinAddress("192.168.7.20", 4003),
        JoinAddress("fd00::20", 4002),
    )
    findings = await StaticSeeds(addresses).suggest()
    assert [suggestion.address for suggestion in findings.suggestions] == list(addresses)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seeds: [https://control-1:4002]\n", "write HOST:PORT"),
        ("seeds: control-1\n", "seeds"),
        ("seed: [control-1]\n", "seed"),
        ("- control-1\n", "expected a mapping"),
        ("seeds: [a]\n---\nseeds: [b]\n", "a single document"),
        ("seeds: [" + "a, " * 65 + "]\n", "64"),
    ],
)
def test_a_wrong_file_is_explained_with_its_path(tmp_path: Path, text: str, told: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(FleetctlError, match=r"seeds\.yaml") as error:
        read_seeds(path)
    assert told in error.value.message
