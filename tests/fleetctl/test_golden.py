"""Compares what commands print with the golden files."""

import pytest

from tests.fleetctl.conftest import Golden
from tests.support.golden import FOLDER


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
async def test_commands_print_what_the_golden_file_has(name: str, golden: Golden) -> None:
    await golden(name)
