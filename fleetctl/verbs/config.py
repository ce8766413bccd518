"""Changes of the configuration file that keep its comments and its order.

`fleetctl config`: the fleets that this machine's user works with, and which of them is meant.
"""

import fcntl
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import orjson
import tomlkit
from tomlkit.exceptions import TOMLKitError

from fleetctl.cli.contexts import (
    CONTEXTS,
    CURRENT,
    FILES,
    Configuration,
    Settings,
    load,
    parse_configuration,
)
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from fleetctl.cli.resolve import DEFAULT_PATH, config_path
from fleetctl.output import printers
from machinery import files
from store.etcd import flags

TomlDocument = tomlkit.TOMLDocument


def edit_file(path: Path, change: Callable[[TomlDocument], None]) -> Configuration:
    """Change the file; what would not be readable afterwards is not written.

    Raises:
        FleetctlError: it cannot be read or written, or the change makes no configuration.

    """
    is_default = path == Path(DEFAULT_PATH).expanduser()
    # A link leads to where the user keeps such files, and stays one.
    path = path.resolve()
    try:
        if is_default:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not path.parent.is_dir():
            # A folder that nobody asked for is a typing mistake kept.
            raise FleetctlError(f"there is no folder {path.parent} for {path.name}; make it first")
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _edit_locked(path, change)
    except OSError as error:
        raise FleetctlError(f"{path} cannot be written: {error.strerror}") from error


def _edit_locked(path: Path, change: Callable[[TomlDocument], None]) -> Configuration:
    load(path)  # a mistake in it is told before anything is changed
    try:
        document = tomlkit.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        document = tomlkit.document()
    except TOMLKitError as error:
        raise FleetctlError(f"{path} is not TOML: {error}") from error
    change(document)
    found = parse_configuration(path, document.unwrap())
    files.write_atomically(path, tomlkit.dumps(document))
    return found


def context_table(document: TomlDocument, name: str) -> Any:
    """Return a context's table, made if it is not there."""
    contexts = document.setdefault(CONTEXTS, tomlkit.table(is_super_table=True))
    return contexts.setdefault(name, tomlkit.table())


def put_settings(
    document: TomlDocument, name: str, settings: Mapping[str, str | tuple[str, ...]]
) -> None:
    """Write settings into a context; an empty one takes the key away."""
    found = context_table(document, name)
    for key, value in settings.items():
        if not value:
            found.pop(key, None)
        else:
            found[key] = list(value) if isinstance(value, tuple) else value
    for key, rival in (("etcd", "data-dir"), ("data-dir", "etcd")):
        if settings.get(key):
            found.pop(rival, None)


def set_current(document: TomlDocument, name: str) -> None:
    """Have a context be the current one; "" means none."""
    if name:
        document[CURRENT] = name
    else:
        document.pop(CURRENT, None)


def rename_table(document: TomlDocument, old: str, new: str) -> None:
    """Give a context another name; the current one stays current."""
    contexts: Any = document[CONTEXTS]
    contexts[new] = contexts.pop(old)
    if document.get(CURRENT) == old:
        document[CURRENT] = new


def remove_table(document: TomlDocument, name: str) -> None:
    """Take a context away."""
    contexts: Any = document[CONTEXTS]
    contexts.pop(name)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")

_HELP = f"""Say which fleets there are, and which one is meant when no flag says it.

\b
  fleetctl config set-context lab --etcd http://mac-1:2379 --etcd-password-file ~/lab/admin.env
  fleetctl config use-context lab
  fleetctl get nodes --context home

Contexts are kept in {DEFAULT_PATH}, or in the file that FLEETCTL_CONFIG names. A flag is stronger than the environment,
the environment than a context. A store that a flag or the environment names makes all of the context not count.
"""


@click.group(cls=SuggestingGroup, help=_HELP)
def config() -> None:
    """Say which fleets there are, and which one is meant when no flag says it."""


def _configuration() -> Configuration:
    return load(config_path(click.get_current_context()))


@config.command("get-contexts")
@click.argument("name", nargs=-1)
@click.option("-o", "--output", type=click.Choice(["table", "name"]), default="table")
@click.option("--no-headers", is_flag=True, help="Leave out the line of titles.")
def get_contexts(name: tuple[str, ...], output: str, no_headers: bool) -> None:
    """Show the contexts; the current one has a star."""
    found = _configuration()
    for one in name:
        found.context(one)
    shown = [one for one in sorted(found.contexts) if not name or one in name]
    if not shown:
        click.echo(f"no contexts in {found.path}", err=True)
    elif output == "name":
        click.echo("\n".join(shown))
    else:
        rows = [_row(found, one) for one in shown]
        titles = () if no_headers else ("CURRENT", "NAME", "STORE", "USER", "GATEWAY")
        click.echo(printers.align_columns(rows, titles))


def _row(found: Configuration, name: str) -> tuple[str, ...]:
    settings = found.contexts[name]
    etcd = settings.get("etcd", ())
    store = ",".join(etcd) if etcd else str(settings.get("data-dir", ""))
    prefix = settings.get("etcd-prefix", "")
    user = settings.get("etcd-user") or settings.get("etcd-password-file", "")
    return (
        "*" if name == found.current else "",
        name,
        f"{store} {prefix}".strip(),
        str(user),
        str(settings.get("gateway", "")),
    )


@config.command("current-context")
def current_context() -> None:
    """Show the name of the current context."""
    found = _configuration()
    if not found.current:
        raise FleetctlError(
            f"{CURRENT} is not set in {found.path}. `fleetctl config use-context NAME` sets it"
        )
    click.echo(found.current)


@config.command("use-context")
@click.argument("name")
def use_context(name: str) -> None:
    """Make a context the current one."""
    _configuration().context(name)
    _edit_configuration(lambda document: set_current(document, name))
    click.echo(f'Switched to context "{name}".')


@config.command()
@click.argument("what", type=click.Choice([CURRENT]), metavar=CURRENT)
def unset(what: str) -> None:
    """Have no context be the current one."""
    if _configuration().current:
        _edit_configuration(lambda document: set_current(document, ""))
    click.echo(f'Property "{what}" unset.')


def _setting_options(command: Any) -> Any:
    """Add a flag for each setting; the last is shown first."""
    texts = {
        "api-key-file": "File with an API key for the gateway.",
        "gateway": "URL of the gateway, such as http://mac-1:4000.",
        "etcd-transport": "grpc, or http where only plain HTTP passes.",
        "etcd-prefix": "What the fleet's keys begin with: /lab.",
        "etcd-password-file": "File with the password, or one that `fleetctl init-auth` wrote.",
        "etcd-user": "etcd user name.",
        "etcd-key": "Client key (PEM).",
        "etcd-cert": "Client certificate (PEM).",
        "etcd-ca": "CA of etcd (PEM).",
        "data-dir": "Folder of a fleet that `fleetctl up` runs on this machine.",
    }
    for key, text in texts.items():
        command = click.option(f"--{key}", default=None, help=text)(command)
    return click.option(
        "--etcd", multiple=True, help="URL of an etcd member (again for each), or unix:PATH."
    )(command)


@config.command("set-context")
@click.argument("name", required=False)
@click.option("--current", is_flag=True, help="The current context, whatever its name.")
@_setting_options
def set_context(name: str | None, current: bool, **said: Any) -> None:
    """Make a context, or change what is said of it; an empty value takes a setting away."""
    found = load(config_path(click.get_current_context(), may_be_new=True))
    if (name is None) is not current:
        raise click.UsageError("which context? Give its name, or --current")
    if name is None and not found.current:
        raise FleetctlError(f"{CURRENT} is not set in {found.path}; give the context's name")
    chosen = name or found.current
    if not _NAME.fullmatch(chosen):
        raise click.UsageError(f"context {chosen!r}: write letters, digits, '.', '_', '@' and '-'")
    settings = _settings(said)
    _edit_configuration(lambda document: put_settings(document, chosen, settings))
    click.echo(f'Context "{chosen}" {"modified" if chosen in found.contexts else "created"}.')


def _settings(said: dict[str, Any]) -> Settings:
    """Return the settings that flags say; those that name stores and files are looked at."""
    found = {name.replace("_", "-"): value for name, value in said.items() if value is not None}
    etcd = tuple(url for text in found.pop("etcd") for url in _urls(text))
    if said["etcd"]:
        found["etcd"] = etcd
    if etcd and found.get("data-dir"):
        raise click.UsageError("give --etcd or --data-dir: they are two stores")
    for key in (*FILES, "data-dir"):
        if found.get(key):
            found[key] = str(Path(found[key]).expanduser().absolute())
    for key in FILES:
        if found.get(key) and not Path(found[key]).is_file():
            raise click.UsageError(f"--{key}: there is no file {found[key]}")
    if found.get("gateway") and not found["gateway"].startswith(("http://", "https://")):
        raise click.UsageError(f"--gateway {found['gateway']}: write http://HOST:PORT")
    if found.get("etcd-transport") not in (None, "", "grpc", "http"):
        raise click.UsageError(f"--etcd-transport {found['etcd-transport']}: write grpc or http")
    if etcd or found.get("etcd-prefix"):
        _check_store(etcd or ("unix:/",), found.get("etcd-prefix", ""))
    return found


def _urls(text: str) -> list[str]:
    if text.startswith("unix:"):
        return [text]
    return [url.strip() for url in text.split(",") if url.strip()]


def _check_store(etcd: tuple[str, ...], prefix: str) -> None:
    """Refuse what --etcd and --etcd-prefix of other verbs would refuse."""
    nothing = dict.fromkeys(("etcd_ca", "etcd_cert", "etcd_key", "etcd_password_file"))
    nobody = {"etcd_user": "", "etcd_password": "", "etcd_transport": "grpc"}
    flags.address_from_flags({**nothing, **nobody, "etcd": etcd, "etcd_prefix": prefix})


@config.command("rename-context")
@click.argument("old")
@click.argument("new")
def rename_context(old: str, new: str) -> None:
    """Give a context another name."""
    found = _configuration()
    found.context(old)
    if new in found.contexts:
        raise FleetctlError(f"context {new!r} is there already; delete it first, or choose another")
    if not _NAME.fullmatch(new):
        raise click.UsageError(f"context {new!r}: write letters, digits, '.', '_', '@' and '-'")
    _edit_configuration(lambda document: rename_table(document, old, new))
    click.echo(f'Context "{old}" renamed to "{new}".')


@config.command("delete-context")
@click.argument("name")
def delete_context(name: str) -> None:
    """Forget a context; the fleet itself is left alone."""
    found = _configuration()
    found.context(name)
    _edit_configuration(lambda document: remove_table(document, name))
    if found.current == name:
        click.echo(
            "warning: it was the current context, and nothing is guessed in its place: "
            "`fleetctl config use-context NAME` sets another",
            err=True,
        )
    click.echo(f"deleted context {name} from {found.path}")


@config.command()
@click.option("--minify", is_flag=True, help="Show the current context alone.")
@click.option("-o", "--output", type=click.Choice(["toml", "json"]), default="toml")
def view(minify: bool, output: str) -> None:
    """Show the configuration. There are no secrets in it: passwords and keys lie in files of their own."""
    found = _configuration()
    contexts = dict(found.contexts)
    if minify:
        if not found.current:
            raise FleetctlError(f"{CURRENT} is not set in {found.path}, so --minify leaves nothing")
        contexts = {found.current: found.context(found.current)}
    tree = {**({CURRENT: found.current} if found.current else {}), CONTEXTS: contexts}
    if output == "json":
        click.echo(orjson.dumps(tree, option=orjson.OPT_INDENT_2).decode())
        return
    document = TomlDocument()
    set_current(document, found.current)
    for name, settings in contexts.items():
        put_settings(document, name, settings)
    click.echo(document.as_string(), nl=False)


def _edit_configuration(change: Any) -> None:
    edit_file(config_path(click.get_current_context(), may_be_new=True), change)
