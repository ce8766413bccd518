"""Each parser, over every captured output; and the sources of one Mac against each other."""

import json
from pathlib import Path

import pytest

from machinery import redaction
from machinery.macos_commands import COMMANDS
from tests.mac_captures.import_report import ROOT, expected

FOLDERS = sorted(path.parent for path in ROOT.glob("*/SOURCE"))


def name_of(folder: Path) -> str:
    return folder.name


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_every_output_is_read_as_recorded(folder: Path) -> None:
    assert expected(folder) == json.loads((folder / "expected.json").read_text())


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_every_output_has_a_source_and_no_secret(folder: Path) -> None:
    sources = dict(line.split(": ", 1) for line in (folder / "SOURCE").read_text().splitlines())
    for path in folder.glob("*.txt"):
        command = path.stem.partition("@")[0]
        assert command in COMMANDS
        assert sources.get(command) or sources.get("*"), path.stem
        text = path.read_text()
        assert redaction.redact_text(text) == text


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_no_parser_raises_and_none_is_blind(folder: Path) -> None:
    """A recorded parse that is null means a parser that does not know the layout."""
    for name, result in json.loads((folder / "expected.json").read_text()).items():
        assert result is not None, name
        assert "parserRaised" not in str(result), name


def test_there_are_as_many_captures_as_were_seeded() -> None:
    captures = [path.stem for folder in FOLDERS for path in folder.glob("*.txt")]
    assert len(captures) >= 70
    assert len({name.partition("@")[0] for name in captures}) >= 25
