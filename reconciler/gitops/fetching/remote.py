"""Clients for the addresses that a repository may have: https, ssh, git, file. Opens connections when asked to fetch."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dulwich.client import (
    GitClient,
    LocalGitClient,
    SSHGitClient,
    TCPGitClient,
    Urllib3HttpGitClient,
    default_urllib3_manager,
)

from reconciler.gitops.asking import Ask
from reconciler.gitops.fetching.failing import FetchError, forms_of

# A host that is silent for so long is taken as away; the whole fetch has its own limit.
SILENCE_S = 20.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SCP = re.compile(r"(?:(?P<user>[^@/]+)@)?(?P<host>[^:/]+):(?P<path>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """How to get at a repository."""

    client: GitClient
    path: str
    """As the client wants it."""
    secrets: tuple[str, ...] = ()
    """What nobody may read in a message."""


def remote_of(ask: Ask) -> Remote:
    """Return the client for an address.

    Raises:
        FetchError: credentials are missing, or would travel unprotected.

    """
    scheme, colon, _ = ask.repository.partition("://")
    if not colon:
        return _scp(ask)
    parts = urlsplit(ask.repository)
    match scheme:
        case "http" | "https":
            return _http(ask)
        case "ssh":
            path = unquote(parts.path)
            return _ssh(ask, parts.hostname or "", parts.port, parts.username or "", path)
        case "git":
            return Remote(client=TCPGitClient(parts.hostname or "", parts.port), path=parts.path)
        case _:
            return Remote(client=LocalGitClient(), path=unquote(parts.path))


def _http(ask: Ask) -> Remote:
    parts = urlsplit(ask.repository)
    who = ask.credentials
    password = _secret(who.password_file, "credentials.passwordFile")
    username = who.username or unquote(parts.username or "")
    if password and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        message = f"the password for {ask.repository} would travel unprotected; write https://"
        raise FetchError("AuthenticationFailed", message)
    # Its proxies are those of HTTPS_PROXY and NO_PROXY; no file of Git's configuration is read.
    manager = default_urllib3_manager(None, base_url=ask.repository, timeout=SILENCE_S)
    if who.ca_file is not None:
        _secret(who.ca_file, "credentials.caFile")
        manager.connection_pool_kw["ca_certs"] = who.ca_file
    host = parts.netloc.rpartition("@")[2]
    client = Urllib3HttpGitClient(
        f"{parts.scheme}://{host}{parts.path}",
        pool_manager=manager,
        username=(username or "git") if password else None,
        password=password or None,
        timeout=SILENCE_S,
    )
    return Remote(
        client=client, path=parts.path, secrets=tuple(forms_of(username or "git", password))
    )


def _scp(ask: Ask) -> Remote:
    found = _SCP.fullmatch(ask.repository)
    if found is None:
        raise FetchError("RepositoryNotFound", f"{ask.repository} is no address of a repository")
    return _ssh(ask, found["host"], None, found["user"] or "", found["path"])


def _ssh(ask: Ask, host: str, port: int | None, user: str, path: str) -> Remote:
    # A third of all that this process imports, for one scheme.
    from reconciler.gitops.fetching.overssh import AsyncsshVendor  # noqa: PLC0415 - see above

    who = ask.credentials
    if who.known_hosts_file is None:
        message = (
            f"nobody says who {host} is: name a file with its key in credentials.knownHostsFile "
            f"(ssh-keyscan {host} writes one; compare it with what the host's owner says)"
        )
        raise FetchError("HostKeyRefused", message)
    if who.ssh_key_file is None:
        message = f"{host} wants to know who we are: name a private key in credentials.sshKeyFile"
        raise FetchError("CredentialsMissing", message)
    key = _secret(who.ssh_key_file, "credentials.sshKeyFile")
    _secret(who.known_hosts_file, "credentials.knownHostsFile")
    vendor = AsyncsshVendor(key=key, known_hosts=who.known_hosts_file, silence_s=SILENCE_S)
    username = unquote(user) or who.username or "git"
    client = SSHGitClient(host, port=port, username=username, vendor=vendor)
    return Remote(client=client, path=path)


def _secret(path: str | None, field: str) -> str:
    """Return the text of a file that the spec names.

    Raises:
        FetchError: it cannot be read here.

    """
    if path is None:
        return ""
    try:
        return Path(path).read_text().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        name = Path(path).name
        message = (
            f"{field}: {name} cannot be read in the reconciler's --git-credentials folder: {why}. "
            "Each Mac that may lead needs it"
        )
        raise FetchError("CredentialsMissing", message) from error
