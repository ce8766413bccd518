"""The verb `fleetctl config`: edits contexts, which name the fleets of a user; keeps comments and order."""

import fcntl
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import tomlkit
from tomlkit.exceptions import TOMLKitError

from fleetctl.cli.arguments import output_option, parse_urls
from fleetctl.cli.contexts import (
    CONTEXTS,
    CURRENT,
    FILES,
    FOLDERS,
    Configuration,
    Settings,
    load,
    parse_configuration,
)
from fleetctl.cli.documents import print_tree
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from fleetctl.cli.resolve import DEFAULT_PATH, config_path
from fleetctl.fleets.data_dir import DataDir
from fleetctl.output import printers
from machinery import files
from machinery.clock import SystemClock
from schemas.wire import identity_files
from store.etcd import flags

TomlDocument = tomlkit.TOMLDocument


def edit_file(path: Path, change: Callable[[TomlDocument], None]) -> Configuration:
    """Change the configuration file; an invalid result is not written.

    Raises:
        FleetctlError: the file cannot be read or written, or the result is invalid.

    """
    is_default = path == Path(DEFAULT_PATH).expanduser()
    # Write to the target of a symbolic link, so that the link stays.
    path = path.resolve()
    try:
        if is_default:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not path.parent.is_dir():
            # Do not create a folder of a custom path: it is probably a typing error.
            raise FleetctlError(
                f"the folder {path.parent} for {path.name} does not exist; create it first"
            )
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _edit_locked(path, change)
    except OSError as error:
        raise FleetctlError(f"cannot write {path}: {error.strerror}") from error


def _edit_locked(path: Path, change: Callable[[TomlDocument], None]) -> Configuration:
    load(path)  # report an invalid file before anything is changed
    try:
        document = tomlkit.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        document = tomlkit.document()
    except TOMLKitError as error:
        raise FleetctlError(f"{path} is not TOML: {error}") from error
    change(document)
    configuration = parse_configuration(path, document.unwrap())
    files.write_atomically(path, tomlkit.dumps(document))
    return configuration


def context_table(document: TomlDocument, name: str) -> Any:
    """Return a context's table; create it if necessary."""
    contexts = document.setdefault(CONTEXTS, tomlkit.table(is_super_table=True))
    return contexts.setdefault(name, tomlkit.table())


def put_settings(
    document: TomlDocument, name: str, settings: Mapping[str, str | tuple[str, ...]]
) -> None:
    """Write settings into a context; an empty value removes the key."""
    table = context_table(document, name)
    for key, value in settings.items():
        if not value:
            table.pop(key, None)
        else:
            table[key] = list(value) if isinstance(value, tuple) else value
    for key, alternative in (("etcd", "data-dir"), ("data-dir", "etcd")):
        if settings.get(key):
            table.pop(alternative, None)


def set_current(document: TomlDocument, name: str) -> None:
    """Set the current context; "" removes it."""
    if name:
        document[CURRENT] = name
    else:
        document.pop(CURRENT, None)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")

_HELP = f"""Manage contexts: the fleets that you use, and the one that commands use by default.

\b
  fleetctl config set-context lab --etcd http://mac-1:2379 --etcd-password-file ~/lab/admin.env
  fleetctl config use-context lab
  fleetctl get nodes --context home

Contexts are stored in {DEFAULT_PATH}, or in the file that FLEETCTL_CONFIG names. Flags are stronger than the
environment, and the environment is stronger than a context. If a flag or the environment names a store, the context is
ignored completely.
"""


@click.group(
    cls=SuggestingGroup, help=_HELP, short_help="Manage contexts: the fleets that you use."
)
def config() -> None:
    """Manage contexts: the fleets that you use, and the one that commands use by default."""


def _configuration() -> Configuration:
    return load(config_path(click.get_current_context()))


@config.command("get-contexts")
@click.argument("name", nargs=-1)
@output_option("table", "wide", "name")
@click.option("--no-headers", is_flag=True, help="Omit the header line.")
def get_contexts(name: tuple[str, ...], output: str, no_headers: bool) -> None:
    """List the contexts; a star marks the current one. -o wide adds the gateways that the store listed last.

    STATE is that of a fleet on this machine: running, down, or deleted with its data folder.
    """
    configuration = _configuration()
    for one in name:
        configuration.context(one)
    shown = [context for context in sorted(configuration.contexts) if not name or context in name]
    if not shown:
        click.echo(f"no contexts in {configuration.path}", err=True)
    elif output == "name":
        click.echo("\n".join(shown))
    else:
        rows = [_row(configuration, one) for one in shown]
        titles: tuple[str, ...] = ("CURRENT", "NAME", "STORE", "STATE", "USER", "GATEWAY")
        if output == "wide":
            titles += ("KNOWN GATEWAYS", "SEEN")
            rows = [(*row, *_known(configuration, row[1])) for row in rows]
        click.echo(printers.align_columns(rows, () if no_headers else titles))


def _row(configuration: Configuration, name: str) -> tuple[str, ...]:
    settings = configuration.contexts[name]
    etcd = settings.get("etcd", ())
    store = ",".join(etcd) if etcd else str(settings.get("data-dir", ""))
    prefix = settings.get("etcd-prefix", "")
    user = settings.get("etcd-user") or settings.get("etcd-password-file", "")
    return (
        "*" if name == configuration.current else "",
        name,
        f"{store} {prefix}".strip(),
        _state(settings),
        str(user),
        ",".join(settings.get("gateway", ())),
    )


def _state(settings: Settings) -> str:
    """Return whether the fleet of a data folder runs; "-" for a store elsewhere, which is not asked."""
    path = settings.get("data-dir")
    if not path:
        return "-"
    folder = DataDir(Path(str(path)))
    try:
        return "running" if folder.is_locked() else "down" if folder.path.exists() else "deleted"
    except OSError:  # a folder of another user
        return "unknown"


def _known(configuration: Configuration, name: str) -> tuple[str, str]:
    """Return the gateways that the store of a context listed last, and how long ago that was."""
    from fleetctl.fleets.known_gateways import (  # noqa: PLC0415 - only -o wide needs pydantic
        KnownGateways,
        store_name,
    )

    now, known = SystemClock().now(), KnownGateways(configuration.path)
    fleet = known.find(store_name(configuration.contexts[name]), now)
    if fleet is None:
        return "", ""
    urls = sorted(lease.url for lease in fleet.gateways.values())
    return ",".join(urls), printers.age(fleet.seen, now)


@config.command("current-context")
def current_context() -> None:
    """Print the name of the current context."""
    configuration = _configuration()
    if not configuration.current:
        raise FleetctlError(
            f"{CURRENT} is not set in {configuration.path}. Set it with `fleetctl config use-context NAME`"
        )
    click.echo(configuration.current)


@config.command("use-context")
@click.argument("name")
def use_context(name: str) -> None:
    """Select the current context."""
    _configuration().context(name)
    _edit_configuration(lambda document: set_current(document, name))
    click.echo(f'Switched to context "{name}".')


@config.command()
@click.argument("what", type=click.Choice([CURRENT]), metavar=CURRENT)
def unset(what: str) -> None:
    """Remove the selection of a current context."""
    if _configuration().current:
        _edit_configuration(lambda document: set_current(document, ""))
    click.echo(f'Property "{what}" unset.')


def _setting_options(command: Any) -> Any:
    """Add a flag for each setting; click shows the last one first."""
    texts = {
        "api-key-file": "File with an API key for the gateway.",
        "gateway-ca": "CA certificate of gateways that serve HTTPS (PEM).",
        "etcd-transport": "grpc, or http if only plain HTTP reaches etcd.",
        "etcd-prefix": "Prefix of the fleet's keys, such as /lab.",
        "etcd-password-file": "File with the password, or a file of `fleetctl init-auth`.",
        "etcd-user": "etcd user name.",
        "etcd-key": "Client key (PEM).",
        "etcd-cert": "Client certificate (PEM).",
        "etcd-ca": "CA certificate of etcd (PEM).",
        "identity-dir": "Folder with your certificate of the fleet (identity.pem, ca.pem).",
        "data-dir": "Data folder of a fleet that `fleetctl up` runs on this machine.",
    }
    for key, text in texts.items():
        command = click.option(f"--{key}", default=None, help=text)(command)
    command = click.option(
        "--gateway",
        multiple=True,
        help="URL of a gateway, such as http://mac-1:4000 (repeatable). They are tried in turn.",
    )(command)
    return click.option(
        "--etcd", multiple=True, help="URL of an etcd member (repeatable), or unix:PATH."
    )(command)


@config.command("set-context")
@click.argument("name", required=False)
@click.option("--current", is_flag=True, help="Change the current context.")
@_setting_options
def set_context(name: str | None, current: bool, **values: Any) -> None:
    """Create or change a context; an empty value removes a setting."""
    configuration = load(config_path(click.get_current_context(), may_be_new=True))
    if (name is None) is not current:
        raise click.UsageError("give either the context's name or --current")
    if name is None and not configuration.current:
        raise FleetctlError(
            f"{CURRENT} is not set in {configuration.path}; give the context's name"
        )
    chosen = name or configuration.current
    _check_name(chosen)
    settings = _settings(values)
    _edit_configuration(lambda document: put_settings(document, chosen, settings))
    click.echo(
        f'Context "{chosen}" {"modified" if chosen in configuration.contexts else "created"}.'
    )


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise click.UsageError(f"context {name!r}: use only letters, digits, '.', '_', '@' and '-'")


def _settings(values: dict[str, Any]) -> Settings:
    """Return the settings of the flags; check stores and files."""
    settings = {
        name.replace("_", "-"): value for name, value in values.items() if value is not None
    }
    etcd = tuple(url for text in settings.pop("etcd") for url in _urls(text))
    if values["etcd"]:
        settings["etcd"] = etcd
    if gateway := settings.pop("gateway"):
        settings["gateway"] = parse_urls(gateway)
    if etcd and settings.get("data-dir"):
        raise click.UsageError("give either --etcd or --data-dir, because they name two stores")
    # Make paths absolute; refuse files that do not exist.
    for key in (*FILES, *FOLDERS):
        if settings.get(key):
            settings[key] = str(Path(settings[key]).expanduser().absolute())
    for key in FILES:
        if settings.get(key) and not Path(settings[key]).is_file():
            raise click.UsageError(f"--{key}: the file {settings[key]} does not exist")
    folder = settings.get("identity-dir")
    if folder and not Path(folder, identity_files.IDENTITY).is_file():
        raise click.UsageError(f"--identity-dir: {folder} holds no {identity_files.IDENTITY}")
    if settings.get("etcd-transport") not in (None, "", "grpc", "http"):
        raise click.UsageError(
            f"--etcd-transport {settings['etcd-transport']}: expected grpc or http"
        )
    if etcd or settings.get("etcd-prefix"):
        _check_store(etcd or ("unix:/",), settings.get("etcd-prefix", ""))
    return settings


def _urls(text: str) -> list[str]:
    if text.startswith("unix:"):
        return [text]
    return [url.strip() for url in text.split(",") if url.strip()]


def _check_store(etcd: tuple[str, ...], prefix: str) -> None:
    """Apply the checks that other verbs apply to --etcd and --etcd-prefix."""
    no_files = dict.fromkeys(("etcd_ca", "etcd_cert", "etcd_key", "etcd_password_file"))
    no_user = {"etcd_user": "", "etcd_password": "", "etcd_transport": "grpc"}
    flags.address_from_flags({**no_files, **no_user, "etcd": etcd, "etcd_prefix": prefix})


@config.command("rename-context")
@click.argument("old")
@click.argument("new")
def rename_context(old: str, new: str) -> None:
    """Rename a context."""
    configuration = _configuration()
    configuration.context(old)
    if new in configuration.contexts:
        raise FleetctlError(
            f"context {new!r} already exists; delete it first, or choose another name"
        )
    _check_name(new)

    def rename(document: TomlDocument) -> None:
        contexts: Any = document[CONTEXTS]
        contexts[new] = contexts.pop(old)
        if document.get(CURRENT) == old:
            document[CURRENT] = new

    _edit_configuration(rename)
    click.echo(f'Context "{old}" renamed to "{new}".')


@config.command("delete-context")
@click.argument("name")
def delete_context(name: str) -> None:
    """Delete a context; the fleet itself is not changed."""
    configuration = _configuration()
    configuration.context(name)

    def remove(document: TomlDocument) -> None:
        contexts: Any = document[CONTEXTS]
        contexts.pop(name)

    _edit_configuration(remove)
    if configuration.current == name:
        click.echo(
            "warning: it was the current context, and no other takes its place. "
            "Select one with `fleetctl config use-context NAME`",
            err=True,
        )
    click.echo(f"deleted context {name} from {configuration.path}")


@config.command()
@click.option("--minify", is_flag=True, help="Show the current context only.")
@output_option("toml", "json")
def view(minify: bool, output: str) -> None:
    """Print the configuration. It contains no secrets, because passwords and keys are in separate files."""
    configuration = _configuration()
    contexts = dict(configuration.contexts)
    if minify:
        if not configuration.current:
            raise FleetctlError(
                f"{CURRENT} is not set in {configuration.path}, so --minify leaves nothing"
            )
        contexts = {configuration.current: configuration.context(configuration.current)}
    tree = {
        **({CURRENT: configuration.current} if configuration.current else {}),
        CONTEXTS: contexts,
    }
    if output == "json":
        print_tree(tree, "json")
        return
    document = TomlDocument()
    set_current(document, configuration.current)
    for name, settings in contexts.items():
        put_settings(document, name, settings)
    click.echo(document.as_string(), nl=False)


def _edit_configuration(change: Any) -> None:
    edit_file(config_path(click.get_current_context(), may_be_new=True), change)
