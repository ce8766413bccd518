"""Rights of GitSources: their credentials, and the addresses that they may name.

Credentials are files on this machine, in one folder for each host that they may be sent to. A committer chooses the
repository and the file name of a GitSource; the folder is the machine owner's choice: no manifest can send a password
to another host.
"""

from dataclasses import dataclass
from pathlib import Path

from manifests import ownership, trees
from manifests.trees import ABSENT
from reconciler.services.gitops.fetch_messages import FetchCredentials, FetchFailure
from schemas.gitsource import GitCredentials, GitSource, repository_address, source_of_manager
from store import objects
from store.port import Transport

_PLACE = ("spec", "credentials")
_ADDRESS = ("spec", "repository")
_SHOWN = 3
FLAG = "--allow-credentials-from-git"


@dataclass(frozen=True, slots=True, kw_only=True)
class GitSettings:
    """Folders on this machine for Git, and the rights of GitSources."""

    cache: Path
    """Folder for fetched commits."""
    credentials: Path
    """Folder with a folder for each host, which has the files that spec.credentials names."""
    credentials_from_git: bool = False
    """True if GitSources that come out of Git may name credentials."""


def find(source: GitSource, settings: GitSettings) -> FetchCredentials | FetchFailure:
    """Return the credentials of a source, or the reason why it gets none."""
    credentials = source.spec.credentials
    if credentials is None:
        return FetchCredentials()
    if not settings.credentials_from_git and is_from_git(source):
        message = (
            "spec.credentials comes from a repository: whoever commits there could use every credential of this "
            f"host. Set it by hand (fleetctl patch gs/{source.name}), or start the reconcilers with {FLAG}"
        )
        return FetchFailure(reason="CredentialsRefused", message=message)
    address = repository_address(source.spec.repository)
    if not address.host:
        return FetchCredentials()  # a path on this machine: nothing is sent
    for field, name in _files(credentials):
        problem = _problem(settings.credentials, address.host, name)
        if problem is not None:
            message = f"credentials.{field}: {problem.message}"
            return problem.model_copy(update={"message": message})
    folder = settings.credentials / address.host

    def path_of(name: str | None) -> str | None:
        return None if name is None else str(folder / name)

    return FetchCredentials(
        username=credentials.username,
        password_file=path_of(credentials.password_file),
        ssh_key_file=path_of(credentials.ssh_key_file),
        known_hosts_file=path_of(credentials.known_hosts_file),
        ca_file=path_of(credentials.ca_file),
    )


async def trusted_host(transport: Transport, source: GitSource) -> str | None | FetchFailure:
    """Return the only host with a private address that a source out of Git may use: that of the source it comes from.

    "" if it may use none, None if a person applied the source, which may use all; or the reason why it is not fetched.

    Raises:
        StoreError: the store did not answer.

    """
    if not is_from_git(source, _ADDRESS):
        return None
    address = source.spec.repository
    scheme, colon, _ = address.partition("://")
    if colon and scheme not in ("https", "ssh"):
        message = (
            f"{address} comes out of a repository: whoever commits there could read what only this machine reaches. Use "
            "https:// or ssh://, or apply the GitSource by hand (fleetctl apply -f)"
        )
        return FetchFailure(reason="RepositoryRefused", message=message)
    for entry in ownership.git_entries(source.metadata.managed_fields):
        parent = await objects.get(transport, GitSource, source_of_manager(entry.manager) or "")
        host = "" if parent is None else repository_address(parent.spec.repository).host
        if host == repository_address(address).host:
            return host
    return ""


def is_from_git(source: GitSource, place: trees.Path = _PLACE) -> bool:
    """Return whether a field of a source comes out of a repository, by default its credentials.

    It does if a GitSource applies it, and if no other writer is recorded for it: a source that was kept by another one
    keeps its credentials when that one is deleted.
    """
    entries = source.metadata.managed_fields
    applied = {
        entry.manager
        for entry in entries
        if entry.operation == "Apply"
        and trees.value_at(ownership.last_applied(entry), place) is not ABSENT
    }
    text = trees.show_path(place)
    updated = {
        entry.manager
        for entry in entries
        if any(field == text or field.startswith(f"{text}.") for field in entry.fields)
    }
    if any(source_of_manager(manager) is not None for manager in applied):
        return True
    return not (applied | updated)


def _files(credentials: GitCredentials) -> list[tuple[str, str]]:
    """Return the fields that name files, and the names."""
    named = (
        ("passwordFile", credentials.password_file),
        ("sshKeyFile", credentials.ssh_key_file),
        ("knownHostsFile", credentials.known_hosts_file),
        ("caFile", credentials.ca_file),
    )
    return [(field, name) for field, name in named if name is not None]


def _problem(folder: Path, host: str, name: str) -> FetchFailure | None:
    """Return why a file is not used for a host; None if it is."""
    if (folder / host / name).exists():
        return None
    if (folder / name).is_file():
        message = (
            f"{name} is not bound to a host, so it is not sent to {host}. If it belongs there, run: "
            f"mkdir -p {folder / host} && mv {folder / name} {folder / host}/"
        )
        return FetchFailure(reason="CredentialsRefused", message=message)
    others = sorted(path.parent.name for path in folder.glob(f"*/{name}"))
    if others:
        shown = ", ".join(others[:_SHOWN])
        message = f"{name} is bound to {shown}, so it is not sent to {host}"
        return FetchFailure(reason="CredentialsRefused", message=message)
    message = (
        f"{name} is missing in the reconciler's --git-credentials folder: expected {folder / host / name}. "
        "Every Mac that runs a reconciler needs it"
    )
    return FetchFailure(reason="CredentialsMissing", message=message)
