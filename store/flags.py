"""The command-line flags that say where etcd is: the same for every process of the fleet."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from store.address import EtcdAddress

Command = Callable[..., Any]


class _EtcdUrl(click.ParamType[str]):
    """One URL; in the environment several have commas between them, for paths may have blanks."""

    name = "url"
    envvar_list_splitter = ","


def _several(text: str) -> list[str]:
    """Return the URLs in one flag: `http://a:2379,http://b:2379`, but one unix:PATH, whatever is in it."""
    if text.startswith("unix:"):
        return [text]
    return [url.strip() for url in text.split(",") if url.strip()]


def etcd_options(command: Command) -> Command:
    """Add --etcd and its companions to a click command; it receives them as keyword arguments."""
    path = click.Path(exists=True, dir_okay=False, path_type=Path)
    for option in (
        click.option("--etcd-user", envvar="FLEET_ETCD_USER", default="", help="etcd user name."),
        click.option(
            "--etcd-password",
            envvar="FLEET_ETCD_PASSWORD",
            default="",
            hidden=True,  # on a command line everybody on the machine could read it
        ),
        click.option("--etcd-key", envvar="FLEET_ETCD_KEY", type=path, help="Client key (PEM)."),
        click.option(
            "--etcd-cert", envvar="FLEET_ETCD_CERT", type=path, help="Client certificate (PEM)."
        ),
        click.option("--etcd-ca", envvar="FLEET_ETCD_CA", type=path, help="CA of etcd (PEM)."),
        click.option(
            "--etcd",
            envvar="FLEET_ETCD",
            multiple=True,
            type=_EtcdUrl(),
            help="URL of an etcd member (again for each), or unix:PATH of a socket.",
        ),
    ):
        command = option(command)
    return command


def address(options: dict[str, Any], default: EtcdAddress | None = None) -> EtcdAddress:
    """Return the address that the flags say.

    Raises:
        click.UsageError: they say none, or contradict each other.

    """
    urls = tuple(url for text in options["etcd"] for url in _several(text))
    if not urls:
        if default is not None:
            return default
        raise click.UsageError(
            "which etcd? Give --etcd URL (or unix:PATH), or set FLEET_ETCD; "
            "`fleetctl up` starts a fleet with its own"
        )
    sockets = [url for url in urls if url.startswith("unix:")]
    wrong = [u for u in urls if not u.startswith(("unix:", "http://", "https://"))]
    if wrong:
        raise click.UsageError(f"--etcd {wrong[0]}: write http://HOST:PORT, https:// or unix:PATH")
    if sockets and len(urls) > 1:
        raise click.UsageError("--etcd takes one unix:PATH, or URLs, not both")
    found = EtcdAddress(
        endpoints=() if sockets else urls,
        socket=Path(sockets[0].removeprefix("unix:")) if sockets else None,
        ca=options["etcd_ca"],
        certificate=options["etcd_cert"],
        key=options["etcd_key"],
        username=options["etcd_user"],
        password=options["etcd_password"],
    )
    try:
        found.ssl_context()
    except (OSError, ssl.SSLError) as error:
        raise click.UsageError(f"etcd's TLS files cannot be used: {error}") from error
    return found
