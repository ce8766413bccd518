"""Clients for the addresses that a repository may have: https, ssh, git, file. Opens connections when asked to fetch.

The bare repository in which what was fetched is kept: opened, filled, and thrown away when it is broken or grown.

A cache, never the truth: whatever is wrong with it, it is removed and made again from the other side.
"""

import fcntl
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from dulwich.errors import GitProtocolError
from dulwich.objects import Commit, ObjectID, Tag
from dulwich.refs import Ref
from dulwich.repo import Repo

from machinery.files import make_private_folder
from manifests import suggestions
from reconciler.gitops.fetch_messages import FetchRequest
from reconciler.gitops.fetch_process.errors import BROKEN, FetchError, secret_forms, short_message

# A host that is silent for so long is taken as away; the whole fetch has its own limit.
SILENCE_S = 20.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SCP = re.compile(r"(?:(?P<user>[^@/]+)@)?(?P<host>[^:/]+):(?P<path>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GitRemote:
    """How to get at a repository."""

    client: GitClient
    path: str
    """As the client wants it."""
    secrets: tuple[str, ...] = ()
    """What nobody may read in a message."""


def make_remote(ask: FetchRequest) -> GitRemote:
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
            return GitRemote(client=TCPGitClient(parts.hostname or "", parts.port), path=parts.path)
        case _:
            return GitRemote(client=LocalGitClient(), path=unquote(parts.path))


def _http(ask: FetchRequest) -> GitRemote:
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
    return GitRemote(
        client=client, path=parts.path, secrets=tuple(secret_forms(username or "git", password))
    )


def _scp(ask: FetchRequest) -> GitRemote:
    found = _SCP.fullmatch(ask.repository)
    if found is None:
        raise FetchError("RepositoryNotFound", f"{ask.repository} is no address of a repository")
    return _ssh(ask, found["host"], None, found["user"] or "", found["path"])


def _ssh(ask: FetchRequest, host: str, port: int | None, user: str, path: str) -> GitRemote:
    # A third of all that this process imports, for one scheme.
    from reconciler.gitops.fetch_process.ssh import AsyncsshVendor  # noqa: PLC0415 - see above

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
    return GitRemote(client=client, path=path)


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


# Each fetch adds a pack. What nobody needs any more is not searched for: the whole is fetched again.
_MOST_PACKS = 24
# What we have, for the other side to leave out.
_HELD = Ref(b"refs/heads/held")
_MOST_TAGS = 5


@contextmanager
def lock_cache(folder: Path) -> Iterator[None]:
    """Hold the cache alone: a leader that is being replaced may still fetch. Raises OSError."""
    make_private_folder(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def open_repository(folder: Path) -> Iterator[Repo]:
    """Yield the repository in a folder that is locked, made if it has to be."""
    where = folder / "repository.git"
    packs = where / "objects" / "pack"
    if len(list(packs.glob("*.pack"))) > _MOST_PACKS:
        shutil.rmtree(where)
    repo = _open(where)
    try:
        yield repo
    finally:
        repo.close()


def _open(where: Path) -> Repo:
    for left in (*where.glob("objects/incoming-*"), *where.glob("objects/tmp_pack_*")):
        left.unlink(missing_ok=True)  # of a fetch that was killed
    if not where.is_dir():
        # Half of a repository is none, so it gets its name when it is whole.
        fresh = where.with_name("new.git")
        shutil.rmtree(fresh, ignore_errors=True)
        Repo.init_bare(str(fresh), mkdir=True).close()
        fresh.rename(where)
    return Repo(str(where), bare=True)


def fetch_commit(folder: Path, ask: FetchRequest, remote: GitRemote) -> bytes:
    """Return the newest commit of what is asked for, which is in the cache then.

    Raises:
        FetchError: there is no such branch, tag or commit.
        Exception: what `failing.CAUGHT` lists.

    """
    try:
        return _fetched(folder, ask, remote)
    except BROKEN:
        # Whose fault it is cannot be told: from nothing, it must work.
        shutil.rmtree(folder / "repository.git", ignore_errors=True)
        return _fetched(folder, ask, remote)


def _fetched(folder: Path, ask: FetchRequest, remote: GitRemote) -> bytes:
    with open_repository(folder) as repo:
        pinned = None if ask.commit is None else ObjectID(ask.commit.encode())
        if pinned is not None and pinned in repo.object_store:
            return pinned
        chosen: list[ObjectID] = []

        def wants(refs: Mapping[Ref, ObjectID], depth: int | None = None) -> list[ObjectID]:
            assert depth in (None, 1)  # as asked below
            sha = _choose(ask, refs)
            chosen.append(sha)
            return [] if sha in repo.object_store else [sha]

        prefix = b"refs/tags/" if ask.tag is not None else b"refs/heads/"
        try:
            remote.client.fetch(
                remote.path, repo, determine_wants=wants, depth=1, ref_prefix=[prefix]
            )
        except GitProtocolError as error:
            if ask.commit is None or not chosen:
                raise
            # Some say "not our ref", others just hang up.
            message = (
                f"{ask.repository} does not give us commit {ask.commit}: {short_message(error)}"
            )
            raise FetchError("ReferenceNotFound", message) from error
        if not chosen:
            raise FetchError(
                "ReferenceNotFound", f"{ask.repository} is empty: it has no commit yet"
            )
        commit = commit_of(repo, chosen[0])
        repo.refs[_HELD] = ObjectID(commit.id)
        return commit.id


def commit_of(repo: Repo, sha: bytes) -> Commit:
    """Return the commit under a hash, which may be that of a tag.

    Raises:
        FetchError: it is no commit.
        KeyError: it is not there.

    """
    found = repo[ObjectID(sha)]
    for _ in range(_MOST_TAGS):
        if not isinstance(found, Tag):
            break
        found = repo[found.object[1]]
    if not isinstance(found, Commit):
        message = f"{sha.decode()} is no commit but a {found.type_name.decode()}"
        raise FetchError("ReferenceNotFound", message)
    return found


def _choose(ask: FetchRequest, refs: Mapping[Ref, ObjectID]) -> ObjectID:
    if ask.commit is not None:
        return ObjectID(ask.commit.encode())
    kind, name = ("tag", ask.tag) if ask.tag is not None else ("branch", ask.branch or "")
    prefix = b"refs/tags/" if kind == "tag" else b"refs/heads/"
    found = refs.get(Ref(prefix + name.encode()))
    if found is not None:
        return found
    there = sorted(
        ref.removeprefix(prefix).decode("utf-8", "replace")
        for ref in refs
        if ref.startswith(prefix) and not ref.endswith(b"^{}")
    )
    hint = suggestions.did_you_mean(name, there[:20], "There are") or f"It has no {kind} at all"
    raise FetchError("ReferenceNotFound", f"{ask.repository} has no {kind} {name}. {hint}")
