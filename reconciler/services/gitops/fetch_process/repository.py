"""Fetches a commit into a bare repository on disk, by https, ssh, git or file.

The repository is a cache: when it is broken or too large, it is removed and fetched again.
"""

import fcntl
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
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
from machinery.process_secrets import OpenSecretError, read_secret_file
from manifests import suggestions
from reconciler.services.gitops.fetch_messages import FetchRequest
from reconciler.services.gitops.fetch_process import egress
from reconciler.services.gitops.fetch_process.errors import (
    BROKEN,
    FetchError,
    printable,
    secret_forms,
    short_message,
)
from schemas.gitsource import GitCommit

# A server that is silent for this long counts as away; the whole fetch has its own limit.
SILENCE_S = 20.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SCP = re.compile(r"(?:(?P<user>[^@/]+)@)?(?P<host>[^:/]+):(?P<path>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GitRemote:
    """The client for a repository."""

    client: GitClient
    path: str
    """Path in the form that the client expects."""
    secrets: tuple[str, ...] = ()
    """Texts that must not appear in a message."""


def make_remote(request: FetchRequest) -> GitRemote:
    """Return the client for an address.

    Raises:
        FetchError: credentials are missing, or would travel unprotected.

    """
    remote = _make_remote(request)
    if request.trusted_host is not None:
        egress.restrict(request.trusted_host, getattr(remote.client, "pool_manager", None))
    return remote


def _make_remote(request: FetchRequest) -> GitRemote:
    scheme, colon, _ = request.repository.partition("://")
    if not colon:
        found = _SCP.fullmatch(request.repository)
        if found is None:
            raise FetchError(
                "RepositoryNotFound", f"{request.repository} is not the address of a repository"
            )
        return _ssh(request, found["host"], None, found["user"] or "", found["path"])
    parts = urlsplit(request.repository)
    match scheme:
        case "http" | "https":
            return _http(request)
        case "ssh":
            path = unquote(parts.path)
            return _ssh(request, parts.hostname or "", parts.port, parts.username or "", path)
        case "git":
            return GitRemote(client=TCPGitClient(parts.hostname or "", parts.port), path=parts.path)
        case _:
            return GitRemote(client=LocalGitClient(), path=unquote(parts.path))


def _http(request: FetchRequest) -> GitRemote:
    parts = urlsplit(request.repository)
    credentials = request.credentials
    password = _secret(credentials.password_file, "credentials.passwordFile")
    username = credentials.username or unquote(parts.username or "")
    if password and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        message = f"the password for {request.repository} would travel unencrypted; use https://"
        raise FetchError("AuthenticationFailed", message)
    # Uses the proxies of HTTPS_PROXY and NO_PROXY; reads no Git configuration.
    manager = default_urllib3_manager(None, base_url=request.repository, timeout=SILENCE_S)
    if credentials.ca_file is not None:
        _read(Path(credentials.ca_file), "credentials.caFile", Path.read_bytes)
        manager.connection_pool_kw["ca_certs"] = credentials.ca_file
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


def _ssh(request: FetchRequest, host: str, port: int | None, user: str, path: str) -> GitRemote:
    # asyncssh is a third of this process's imports, and only ssh needs it.
    from reconciler.services.gitops.fetch_process import ssh  # noqa: PLC0415 - see above

    credentials = request.credentials
    if credentials.known_hosts_file is None:
        message = (
            f"the host key of {host} is not known: name a file with it in credentials.knownHostsFile "
            f"(ssh-keyscan {host} writes one; compare it with the key that the host's owner publishes)"
        )
        raise FetchError("HostKeyRefused", message)
    if credentials.ssh_key_file is None:
        message = f"{host} needs authentication: name a private key in credentials.sshKeyFile"
        raise FetchError("CredentialsMissing", message)
    key = _secret(credentials.ssh_key_file, "credentials.sshKeyFile")
    known_hosts = Path(credentials.known_hosts_file)
    _read(known_hosts, "credentials.knownHostsFile", Path.read_bytes)
    vendor = ssh.AsyncsshVendor(
        key=key, known_hosts=credentials.known_hosts_file, silence_s=SILENCE_S
    )
    username = unquote(user) or credentials.username or "git"
    client = SSHGitClient(host, port=port, username=username, vendor=vendor)
    return GitRemote(client=client, path=path)


def _secret(path: str | None, field: str) -> str:
    """Return the password or key in a file that the spec names; "" for None."""
    if path is None:
        return ""
    return _read(Path(path), field, read_secret_file).removesuffix("\n")


def _read(path: Path, field: str, read: Callable[[Path], bytes]) -> str:
    """Read a file that the spec names.

    Raises:
        FetchError: it cannot be read on this machine, or other users may read a secret in it.

    """
    try:
        return read(path).decode()
    except OpenSecretError as error:
        raise FetchError("CredentialsRefused", f"{field}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or error) if isinstance(error, OSError) else "it is not text"
        name = path.name
        message = (
            f"{field}: {name} cannot be read in the reconciler's --git-credentials folder: {why}. "
            "Every Mac that runs a reconciler needs it"
        )
        raise FetchError("CredentialsMissing", message) from error


# Each fetch adds a pack. Instead of a garbage collection, the whole repository is fetched again.
_MOST_PACKS = 24
# The commit that the cache has, so that the server leaves it out.
_HELD = Ref(b"refs/heads/held")
_MOST_TAGS = 5
_MESSAGE_BYTES = 4096


@contextmanager
def lock_cache(folder: Path) -> Iterator[None]:
    """Lock the cache: a leader that is being replaced may still fetch. Raises OSError."""
    make_private_folder(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def open_repository(folder: Path) -> Iterator[Repo]:
    """Open the repository in a locked folder; create it if it does not exist."""
    path = folder / "repository.git"
    packs = path / "objects" / "pack"
    if len(list(packs.glob("*.pack"))) > _MOST_PACKS:
        shutil.rmtree(path)
    for left in (*path.glob("objects/incoming-*"), *path.glob("objects/tmp_pack_*")):
        left.unlink(missing_ok=True)  # of a fetch that was killed
    if not path.is_dir():
        # A partial repository is useless, so it is renamed when it is complete.
        fresh = path.with_name("new.git")
        shutil.rmtree(fresh, ignore_errors=True)
        Repo.init_bare(str(fresh), mkdir=True).close()
        fresh.rename(path)
    repo = Repo(str(path), bare=True)
    try:
        yield repo
    finally:
        repo.close()


def fetch_commit(folder: Path, request: FetchRequest, remote: GitRemote) -> bytes:
    """Fetch the requested commit into the cache, and return its hash.

    Raises:
        FetchError: there is no such branch, tag or commit.
        Exception: one of `errors.CAUGHT`.

    """
    try:
        return _fetched(folder, request, remote)
    except BROKEN:
        # Cache or server may be broken: without a cache, it must work.
        shutil.rmtree(folder / "repository.git", ignore_errors=True)
        return _fetched(folder, request, remote)


def _fetched(folder: Path, request: FetchRequest, remote: GitRemote) -> bytes:
    with open_repository(folder) as repo:
        pinned = None if request.commit is None else ObjectID(request.commit.encode())
        if pinned is not None and pinned in repo.object_store:
            return pinned
        chosen: list[ObjectID] = []

        def wants(refs: Mapping[Ref, ObjectID], depth: int | None = None) -> list[ObjectID]:
            assert depth in (None, 1)  # as asked below
            sha = _choose(request, refs)
            chosen.append(sha)
            return [] if sha in repo.object_store else [sha]

        prefix = b"refs/tags/" if request.tag is not None else b"refs/heads/"
        try:
            remote.client.fetch(
                remote.path, repo, determine_wants=wants, depth=1, ref_prefix=[prefix]
            )
        except GitProtocolError as error:
            if request.commit is None or not chosen:
                raise
            # Some servers answer "not our ref", others close the connection.
            message = (
                f"{request.repository} refuses commit {request.commit}: {short_message(error)}"
            )
            raise FetchError("ReferenceNotFound", message) from error
        if not chosen:
            raise FetchError(
                "ReferenceNotFound", f"{request.repository} is empty: it has no commit yet"
            )
        commit = commit_of(repo, chosen[0])
        repo.refs[_HELD] = ObjectID(commit.id)
        return commit.id


def commit_of(repo: Repo, sha: bytes) -> Commit:
    """Return the commit of a hash, which may be that of a tag.

    Raises:
        FetchError: it is not a commit.
        KeyError: it does not exist.

    """
    commit = repo[ObjectID(sha)]
    for _ in range(_MOST_TAGS):
        if not isinstance(commit, Tag):
            break
        commit = repo[commit.object[1]]
    if not isinstance(commit, Commit):
        message = f"{sha.decode()} is not a commit but a {commit.type_name.decode()}"
        raise FetchError("ReferenceNotFound", message)
    return commit


def describe_commit(commit: Commit) -> GitCommit:
    """Return the author's name and the subject of a commit. Both are whatever a committer wrote."""
    author = commit.author.decode("utf-8", "replace").partition("<")[0]
    subject, _, _ = commit.message.lstrip()[:_MESSAGE_BYTES].partition(b"\n")
    return GitCommit(
        author=printable(author, 100), subject=printable(subject.decode("utf-8", "replace"), 200)
    )


def _choose(request: FetchRequest, refs: Mapping[Ref, ObjectID]) -> ObjectID:
    if request.commit is not None:
        return ObjectID(request.commit.encode())
    kind, name = (
        ("tag", request.tag) if request.tag is not None else ("branch", request.branch or "")
    )
    prefix = b"refs/tags/" if kind == "tag" else b"refs/heads/"
    object_id = refs.get(Ref(prefix + name.encode()))
    if object_id is not None:
        return object_id
    names = sorted(
        ref.removeprefix(prefix).decode("utf-8", "replace")
        for ref in refs
        if ref.startswith(prefix) and not ref.endswith(b"^{}")
    )
    hint = suggestions.did_you_mean(name, names[:20], "There are") or f"It has no {kind} at all"
    raise FetchError("ReferenceNotFound", f"{request.repository} has no {kind} {name}. {hint}")
