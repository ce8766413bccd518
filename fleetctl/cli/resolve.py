"""Resolution of a command's store: flags first, then the environment, then the context. Imported by every verb.

Settings of two sources never mix: if --etcd or --data-dir (or, without --context on the command line, FLEET_ETCD or
FLEET_DATA_DIR) names a store, the context is ignored. One fleet's password and API key must never reach another fleet.
A --context on the command line is a flag, so it is stronger than the environment.
"""

from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from fleetctl.cli.errors import FleetctlError

DEFAULT_PATH = "~/.config/fleetctl/config.toml"

_STORE_OPTIONS = ("etcd", "data_dir")
# Two options for the same setting: the stronger source clears the other.
_ALTERNATIVES = {"etcd_password_file": "etcd_password", "api_key_file": "api_key"}


class SelectedContext(NamedTuple):
    """The context in use; `is_flag` is true if the command line names it."""

    path: Path
    name: str
    settings: dict[str, str | tuple[str, ...]]
    is_flag: bool


def config_path(context: click.Context, *, may_be_new: bool = False) -> Path:
    """Return the path of the configuration file: --config, FLEETCTL_CONFIG, or the default.

    Raises:
        FleetctlError: the file of --config does not exist.

    """
    root = context.find_root()
    path = Path(root.params.get("config") or DEFAULT_PATH).expanduser()
    is_flag = root.get_parameter_source("config") is ParameterSource.COMMANDLINE
    if is_flag and not may_be_new and not _exists(path):
        raise FleetctlError(
            f"--config: the file {path} does not exist. Create it with `fleetctl --config {path} config set-context NAME`, "
            "or remove --config"
        )
    return path


def resolve_options(options: dict[str, Any], flag: str | None) -> dict[str, Any]:
    """Return a command's options, completed from the context; `flag` is the verb's own --context.

    Raises:
        click.UsageError: the flags name two stores.
        FleetctlError: the context does not exist, or the file is invalid.

    """
    context = click.get_current_context()
    # Check the path even if no context is used: a wrong --config is always an error.
    config_path(context)
    sources = {name: context.get_parameter_source(name) for name in options}
    flags = [n for n in _STORE_OPTIONS if sources.get(n) is ParameterSource.COMMANDLINE]
    if len(flags) == 2:
        raise click.UsageError("give either --etcd or --data-dir, because they name two stores")
    if flags:
        # --data-dir overrides a forgotten FLEET_ETCD.
        return {**options, "etcd": ()} if flags == ["data_dir"] and "etcd" in options else options
    from_environment = any(sources.get(n) is ParameterSource.ENVIRONMENT for n in _STORE_OPTIONS)
    if from_environment and not _context_flag(context, flag):
        return options  # do not read the file: an invalid current context is irrelevant here
    chosen = select_context(context, flag)
    return options if chosen is None else _merge(chosen, context, options)


def select_context(context: click.Context, flag: str | None) -> SelectedContext | None:
    """Return the context in use; None if there is none, which needs no file.

    Raises:
        FleetctlError: the context does not exist, or the file is invalid.

    """
    root, path = context.find_root(), config_path(context)
    flag = _context_flag(context, flag)
    named = flag or str(root.params.get("context") or "")
    if not named and not _exists(path):
        return None
    from fleetctl.cli.contexts import dangling_text, load  # noqa: PLC0415 - without a file, no TOML

    config = load(path)
    name = named or config.current
    if not name:
        return None
    if not named and name not in config.contexts:
        raise FleetctlError(dangling_text(config))
    return SelectedContext(path, name, dict(config.context(name)), is_flag=bool(flag))


def _context_flag(context: click.Context, flag: str | None) -> str:
    """Return the --context of the command line, before or after the verb; empty if there is none."""
    root = context.find_root()
    if flag or root.get_parameter_source("context") is not ParameterSource.COMMANDLINE:
        return flag or ""
    return str(root.params.get("context") or "")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # reading the file reports the reason


def _merge(
    chosen: SelectedContext, context: click.Context, options: dict[str, Any]
) -> dict[str, Any]:
    """Add the context's settings to options that no stronger source sets."""
    if "etcd" not in options and chosen.is_flag and "data-dir" not in chosen.settings:
        raise FleetctlError(
            f"`{context.command_path}` works on a data folder of this machine, but context {chosen.name} in "
            f"{chosen.path} has no data-dir"
        )
    found = dict(options)
    parameters = {p.name: p for p in context.command.params}
    for key, value in chosen.settings.items():
        name = key.replace("-", "_")
        alternative = _ALTERNATIVES.get(name, "")
        if name not in options or any(
            _is_stronger(context, n, chosen) for n in (name, alternative)
        ):
            continue
        found[name] = _cast(chosen, key, value, context, parameters[name])
        if alternative in found:
            found[alternative] = ""
        if name == "data_dir" and "etcd" in found:
            found["etcd"] = ()
        if name == "etcd_password_file" and not _is_stronger(context, "etcd_user", chosen):
            # The password file names its user.
            found["etcd_user"] = chosen.settings.get("etcd-user", "")
    return found


def _is_stronger(context: click.Context, name: str, chosen: SelectedContext) -> bool:
    """Return whether the option is set by a source that is stronger than the context."""
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
    """Convert a setting with the option's own type."""
    if isinstance(parameter, click.Option) and parameter.multiple and isinstance(value, str):
        value = (value,)
    try:
        return parameter.type_cast_value(context, value)
    except click.BadParameter as error:
        raise FleetctlError(
            f"{chosen.path}: context {chosen.name}: {key}: {error.message}"
        ) from error
