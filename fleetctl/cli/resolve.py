"""Which fleet a command means: flags, then the environment, then the context. Imported by every verb: stays light.

Who says where the store is, says everything about it: where --etcd or --data-dir (or, unless --context was given,
FLEET_ETCD or FLEET_DATA_DIR) name a store, the context does not count at all. One fleet's password and API key must
never reach another fleet. A --context on the command line is a flag, and so stronger than the environment.
"""

from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from fleetctl.cli.errors import FleetctlError

DEFAULT_PATH = "~/.config/fleetctl/config.toml"

_PLACES = ("etcd", "data_dir")
# What says the same in another way: whoever says one, leaves the other out.
_RIVALS = {"etcd_password_file": "etcd_password", "api_key_file": "api_key"}


class SelectedContext(NamedTuple):
    """The context that counts; `is_flag` says that the command line named it."""

    path: Path
    name: str
    settings: dict[str, str | tuple[str, ...]]
    is_flag: bool


def config_path(context: click.Context, *, may_be_new: bool = False) -> Path:
    """Return where the configuration is: --config, FLEETCTL_CONFIG, or the default.

    Raises:
        FleetctlError: --config names a file that is not there: what is meant is no empty one.

    """
    root = context.find_root()
    path = Path(root.params.get("config") or DEFAULT_PATH).expanduser()
    is_flag = root.get_parameter_source("config") is ParameterSource.COMMANDLINE
    if is_flag and not may_be_new and not _is_there(path):
        raise FleetctlError(
            f"--config: there is no file {path}. Make it with `fleetctl --config {path} config set-context NAME`, "
            "or leave --config out"
        )
    return path


def resolve_options(options: dict[str, Any], flag: str | None) -> dict[str, Any]:
    """Return a command's options with what the context says; `flag` is the verb's own --context.

    Raises:
        click.UsageError: the flags name two stores.
        FleetctlError: the context is not there, or not what it should be.

    """
    context = click.get_current_context()
    # Also where no context counts: whoever names a file means one that is there.
    config_path(context)
    sources = {name: context.get_parameter_source(name) for name in options}
    flags = [n for n in _PLACES if sources.get(n) is ParameterSource.COMMANDLINE]
    if len(flags) == 2:
        raise click.UsageError("give --etcd or --data-dir: they are two stores")
    if flags:
        # A forgotten FLEET_ETCD must not lead to another store than the one on the command line.
        return {**options, "etcd": ()} if flags == ["data_dir"] and "etcd" in options else options
    from_environment = any(sources.get(n) is ParameterSource.ENVIRONMENT for n in _PLACES)
    if from_environment and not _context_flag(context, flag):
        return options  # without a look at the file: a current context that is gone does not matter here
    chosen = select_context(context, flag)
    return options if chosen is None else _merge(chosen, context, options)


def select_context(context: click.Context, flag: str | None) -> SelectedContext | None:
    """Return the context that counts; None if there is none, which no file is needed for.

    Raises:
        FleetctlError: it is not there, or the file is not what it should be.

    """
    root, path = context.find_root(), config_path(context)
    flag = _context_flag(context, flag)
    said = flag or str(root.params.get("context") or "")
    if not said and not _is_there(path):
        return None
    from fleetctl.cli.contexts import dangling_text, load  # noqa: PLC0415 - see above

    config = load(path)
    name = said or config.current
    if not name:
        return None
    if not said and name not in config.contexts:
        raise FleetctlError(dangling_text(config))
    return SelectedContext(path, name, dict(config.context(name)), is_flag=bool(flag))


def _context_flag(context: click.Context, flag: str | None) -> str:
    """Return the context that the command line names, behind the verb or before it; "" if it names none."""
    root = context.find_root()
    if flag or root.get_parameter_source("context") is not ParameterSource.COMMANDLINE:
        return flag or ""
    return str(root.params.get("context") or "")


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # reading it says why not


def _merge(
    chosen: SelectedContext, context: click.Context, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the options with the context's, where nothing stronger says them."""
    if "etcd" not in options and chosen.is_flag and "data-dir" not in chosen.settings:
        raise FleetctlError(
            f"context {chosen.name} is no folder of this machine, which {context.command_path} works on: "
            f"{chosen.path} says no data-dir for it"
        )
    found = dict(options)
    parameters = {p.name: p for p in context.command.params}
    for key, value in chosen.settings.items():
        name = key.replace("-", "_")
        rival = _RIVALS.get(name, "")
        if name not in options or any(_is_stronger(context, n, chosen) for n in (name, rival)):
            continue
        found[name] = _cast(chosen, key, value, context, parameters[name])
        if rival in found:
            found[rival] = ""
        if name == "data_dir" and "etcd" in found:
            found["etcd"] = ()
        if name == "etcd_password_file" and not _is_stronger(context, "etcd_user", chosen):
            # The file knows its user.
            found["etcd_user"] = chosen.settings.get("etcd-user", "")
    return found


def _is_stronger(context: click.Context, name: str, chosen: SelectedContext) -> bool:
    """Return whether an option was said by who counts more than the context."""
    source = context.get_parameter_source(name) if name else None
    if source is ParameterSource.ENVIRONMENT:
        return not chosen.is_flag
    return source is ParameterSource.COMMANDLINE


def _cast(
    chosen: SelectedContext,
    key: str,
    value: str | tuple[str, ...],
    context: click.Context,
    parameter: click.Parameter,
) -> Any:
    """Return a setting as the option's own type has it."""
    try:
        return parameter.type_cast_value(context, value)
    except click.BadParameter as error:
        raise FleetctlError(
            f"{chosen.path}: context {chosen.name}: {key}: {error.message}"
        ) from error
