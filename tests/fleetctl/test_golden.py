"""Compares what commands print with the golden files."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.golden import FOLDER, golden_text

FILES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
async def test_commands_print_what_the_golden_file_has(
    path: Path, request: pytest.FixtureRequest
) -> None:
    # Paths of one length, on which the widths of columns depend.
    with TemporaryDirectory(dir="/tmp") as folder:
        printed = await golden_text(path.read_text(), Path(folder))
    if request.config.getoption("--update-golden"):
        path.write_text(printed)
    assert printed == path.read_text(), "if this is right: pytest --update-golden"
