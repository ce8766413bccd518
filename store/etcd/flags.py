"""The command-line flags for the address of etcd, shared by every process of the fleet."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click

from machinery.options import Option, options
from schemas.wire.identity_files import IdentityFiles
from store.etcd import users
from store.etcd.address import EtcdAddress
from store.etcd.users import Credentials, CredentialsError

VARIABLE_PREFIX: Final = "FLEET_ETCD"
"""Prefix of the environment variables of these flags."""

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PREFIX = re.compile(r"(/[A-Za-z0-9][A-Za-z0-9._-]*)+")
# A prefix with this part could lie within another fleet's keys.
_OURS = "mlx-fleet"


class _EtcdUrl(click.ParamType[str]):
    """One URL; in the environment variable several are separated by commas, because paths may contain spaces."""

    name = "url"
    envvar_list_splitter = ","


ETCD_OPTIONS: Final = (
    Option(
        "--etcd",
        "URL of an etcd member (repeat it for each member), or unix:PATH of a socket.",
        multiple=True,
        type=_EtcdUrl(),
    ),
    Option("--etcd-ca", "CA certificate of etcd (PEM).", type=_FILE),
    Option("--etcd-cert", "Client certificate (PEM).", type=_FILE),
    Option("--etcd-key", "Client key (PEM).", type=_FILE),
    Option("--etcd-user", "User name for etcd.", default=""),
    # A command line is visible to every user of the machine.
    Option("--etcd-password", default="", hidden=True),
    Option(
        "--etcd-password-file",
        "File with the password, or one that `fleetctl init-auth` wrote.",
        type=_FILE,
    ),
    Option(
        "--etcd-transport",
        "Use http (etcd's JSON gateway) where only plain HTTP passes.",
        type=click.Choice(["grpc", "http"]),
        default="grpc",
    ),
    Option(
        "--etcd-prefix",
        "Prefix of the fleet's keys in an etcd that is shared with others, such as /lab.",
        default="",
    ),
)
"""The rows of --etcd and its companions."""
etcd_options: Final = options("FLEET", *ETCD_OPTIONS)
"""Adds --etcd and its companions to a click command; it receives them as keyword arguments."""


def address_from_flags(
    options: Mapping[str, Any],
    default: EtcdAddress | None = None,
    *,
    identity: IdentityFiles | None = None,
) -> EtcdAddress:
    """Return the address from the flags' values. With https, `identity` takes the place of TLS flags that are not given.

    Raises:
        click.UsageError: there is none, or flags contradict each other.

    """
    endpoints, socket = _place(options["etcd"], default)
    credentials = _credentials(options)
    ca, certificate, key = options["etcd_ca"], options["etcd_cert"], options["etcd_key"]
    if identity is not None and any(url.startswith("https:") for url in endpoints):
        ca = ca or identity.authorities
        if certificate is None and key is None:
            certificate = key = identity.identity
    etcd_address = EtcdAddress(
        endpoints=endpoints,
        socket=socket,
        ca=ca,
        certificate=certificate,
        key=key,
        username=credentials.user,
        password=credentials.password,
        transport=options["etcd_transport"],
        prefix=_prefix(options["etcd_prefix"]),
    )
    try:
        etcd_address.ssl_context()
    except OSError as error:  # ssl.SSLError is one
        raise click.UsageError(f"etcd's TLS files cannot be used: {error}") from error
    return etcd_address


def _place(
    texts: tuple[str, ...], default: EtcdAddress | None
) -> tuple[tuple[str, ...], Path | None]:
    """Return the URLs, or the one socket."""
    urls = tuple(url for text in texts for url in _several(text))
    if not urls:
        if default is not None:
            return default.endpoints, default.socket
        raise click.UsageError(
            "no etcd given: use --etcd URL (or unix:PATH), or set FLEET_ETCD; "
            "`fleetctl up` starts a fleet with its own etcd"
        )
    wrong = [u for u in urls if not u.startswith(("unix:", "http://", "https://"))]
    if wrong:
        raise click.UsageError(
            f"--etcd {wrong[0]}: write http://HOST:PORT, https://HOST:PORT or unix:PATH"
        )
    for url in urls:
        if not url.startswith("unix:"):
            # Refuse URLs that the libraries would interpret in an unexpected way.
            parts = urlsplit(url)
            if parts.username is not None or parts.password is not None:
                raise click.UsageError(
                    "--etcd: do not put a user into the URL, which every user of the machine can read; give --etcd-user "
                    "and --etcd-password-file"
                )
            try:
                is_whole = bool(parts.hostname and parts.port)
            except ValueError:
                is_whole = False
            if not is_whole:
                raise click.UsageError(
                    f"--etcd {url}: write host and port, such as http://HOST:2379"
                )
            if parts.path not in ("", "/") or parts.query or parts.fragment:
                raise click.UsageError(
                    f"--etcd {url}: remove the part after the port; for keys below a prefix give --etcd-prefix"
                )
    sockets = [url for url in urls if url.startswith("unix:")]
    if sockets and len(urls) > 1:
        raise click.UsageError("--etcd accepts one unix:PATH, or URLs, not both")
    return ((), Path(sockets[0].removeprefix("unix:"))) if sockets else (urls, None)


def _several(text: str) -> list[str]:
    """Return the URLs in one flag: several separated by commas, or one unix:PATH with any characters."""
    if text.startswith("unix:"):
        return [text]
    return [url.strip() for url in text.split(",") if url.strip()]


def _credentials(options: Mapping[str, Any]) -> Credentials:
    """Return user and password; an empty name means anonymous access."""
    user, password, path = (
        options["etcd_user"],
        options["etcd_password"],
        options["etcd_password_file"],
    )
    if path is not None:
        if password:
            raise click.UsageError(
                "there are two passwords for etcd: --etcd-password-file and FLEET_ETCD_PASSWORD. "
                "Keep one"
            )
        try:
            from_file = users.read_credentials(path)
        except CredentialsError as error:
            raise click.UsageError(f"--etcd-password-file: {error}") from error
        user, password = user or from_file.user, from_file.password
    if password and not user:
        raise click.UsageError("a password for etcd, but no user: give --etcd-user NAME")
    if user and not password:
        raise click.UsageError(
            f"etcd user {user} without a password: give --etcd-password-file FILE, or set "
            "FLEET_ETCD_PASSWORD"
        )
    return Credentials(user=user, password=password)


def _prefix(text: str) -> str:
    if not text:
        return ""
    if not _PREFIX.fullmatch(text):
        raise click.UsageError(
            f"--etcd-prefix {text}: write names of letters, digits, '.', '_' and '-', each after "
            "a slash, and no slash at the end, such as /lab or /teams/lab"
        )
    if _OURS in text.split("/"):
        raise click.UsageError(
            f"--etcd-prefix {text}: {_OURS} follows the prefix in every fleet's keys; "
            "choose another name"
        )
    return text
