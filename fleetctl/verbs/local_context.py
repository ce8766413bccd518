"""The context of a fleet on this machine: `fleetctl up` makes it the current one, `fleetctl down` restores the previous one.

An unusable configuration file is a warning, because the fleet itself runs without it.
"""

import re
from collections.abc import Callable
from pathlib import Path

import click

from fleetctl.cli.connect import default_data_dir
from fleetctl.cli.contexts import Configuration, load
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.resolve import config_path
from fleetctl.fleets.data_dir import DataDir
from fleetctl.verbs.config import TomlDocument, edit_file, put_settings, set_current
from machinery.files import write_atomically


def enter(folder: DataDir) -> None:
    """Make the folder's fleet the current context, so that other commands find it without flags."""
    _change(lambda path: _enter(path, folder))


def leave(folder: DataDir) -> None:
    """If the folder's fleet is the current context, restore the one that was current before it."""
    _change(lambda path: _leave(path, folder))


def _change(change: Callable[[Path], None]) -> None:
    try:
        change(config_path(click.get_current_context(), may_be_new=True))
    except (FleetctlError, OSError) as error:
        click.echo(f"warning: the context was not changed: {error}", err=True)


def _enter(path: Path, folder: DataDir) -> None:
    before = load(path)
    name = _find(before, folder) or _new_name(before, folder)
    if name == before.current:
        return

    def change(document: TomlDocument) -> None:
        if name not in before.contexts:
            put_settings(document, name, {"data-dir": str(folder.path)})
        set_current(document, name)

    write_atomically(folder.previous_context_file, before.current)
    edit_file(path, change)
    click.echo(f'Switched to context "{name}".')


def _leave(path: Path, folder: DataDir) -> None:
    before = load(path)
    try:
        previous = folder.previous_context_file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    folder.previous_context_file.unlink()
    name = _find(before, folder)
    if name is None or name != before.current or (previous and previous not in before.contexts):
        return
    edit_file(path, lambda document: set_current(document, previous))
    if previous:
        click.echo(f'Switched to context "{previous}".')


def _find(configuration: Configuration, folder: DataDir) -> str | None:
    """Return the name of the folder's context, which the user may have renamed."""
    for name, settings in configuration.contexts.items():
        if settings.get("data-dir") == str(folder.path):
            return name
    return None


def _new_name(configuration: Configuration, folder: DataDir) -> str:
    """Return a free name: `local`, or `local-` and the folder's name."""
    word = re.sub(r"[^A-Za-z0-9._@-]+", "-", folder.path.name).strip("-.")
    base = "local" if folder.path == DataDir(default_data_dir()).path else f"local-{word}"
    name, number = base, 1
    while name in configuration.contexts:
        number += 1
        name = f"{base}-{number}"
    return name
