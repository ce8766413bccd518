"""`fleetctl up` makes its fleet the current context, and `fleetctl down` restores the previous one."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from fleetctl.cli.connect import default_data_dir
from fleetctl.cli.contexts import load
from fleetctl.fleets.data_dir import DataDir
from fleetctl.verbs import local_context

LAB = 'current-context = "lab"\n\n# The rack.\n[contexts.lab]\netcd = ["http://mac-1:2379"]\n'


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """The configuration file of the running command; it does not exist yet."""
    path = tmp_path / "config.toml"
    with click.Context(click.Command("up")) as context:
        context.params["config"] = str(path)
        yield path


@pytest.fixture
def folder(tmp_path: Path) -> DataDir:
    made = DataDir(tmp_path / ".fleet")
    made.prepare()
    return made


def test_the_fleet_is_the_current_context_while_it_runs(
    config: Path, folder: DataDir, capsys: pytest.CaptureFixture[str]
) -> None:
    local_context.enter(folder)
    assert tomllib.loads(config.read_text()) == {
        "current-context": "local-fleet",
        "contexts": {"local-fleet": {"data-dir": str(folder.path)}},
    }
    local_context.leave(folder)
    assert load(config).current == ""
    assert capsys.readouterr() == ('Switched to context "local-fleet".\n', "")


def test_the_previous_context_is_restored(
    config: Path, folder: DataDir, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(LAB)
    local_context.enter(folder)
    local_context.enter(folder)  # a second `up`, after a kill of the first
    assert load(config).current == "local-fleet"
    local_context.leave(folder)
    assert load(config).current == "lab"
    assert "# The rack." in config.read_text()
    local_context.leave(folder)
    out = 'Switched to context "local-fleet".\nSwitched to context "lab".\n'
    assert capsys.readouterr() == (out, "")


def test_a_context_that_was_chosen_meanwhile_stays(config: Path, folder: DataDir) -> None:
    config.write_text(LAB.replace("lab", "home"))
    local_context.enter(folder)
    config.write_text(config.read_text().replace('"local-fleet"', '"home"', 1))
    local_context.leave(folder)
    assert load(config).current == "home"


def test_a_deleted_context_is_not_restored(config: Path, folder: DataDir) -> None:
    config.write_text(LAB)
    local_context.enter(folder)
    config.write_text(config.read_text().replace("[contexts.lab]", "[contexts.other]"))
    local_context.leave(folder)
    assert load(config).current == "local-fleet"


def test_a_renamed_context_of_the_folder_is_used(config: Path, folder: DataDir) -> None:
    config.write_text(f'[contexts.mine]\ndata-dir = "{folder.path}"\n')
    local_context.enter(folder)
    assert load(config).current == "mine"
    assert set(load(config).contexts) == {"mine"}


def test_names_are_unique_and_the_default_folder_is_local(
    config: Path, folder: DataDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    other = DataDir(tmp_path / "clone" / ".fleet")
    for data_dir in (folder, other, DataDir(default_data_dir())):
        data_dir.prepare()
        local_context.enter(data_dir)
    assert {name: found["data-dir"] for name, found in load(config).contexts.items()} == {
        "local-fleet": str(folder.path),
        "local-fleet-2": str(other.path),
        "local": str(default_data_dir()),
    }


def test_an_invalid_configuration_is_a_warning(
    config: Path, folder: DataDir, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text("contexts = [")
    local_context.enter(folder)
    local_context.leave(folder)
    assert config.read_text() == "contexts = ["
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert warnings[0].startswith(f"warning: the context was not changed: {config} is not TOML")
