"""Credentials of GitSources: bound to hosts on the reconciler's machine, and not given to sources out of Git."""

from dataclasses import replace
from pathlib import Path

import pytest

from manifests import ownership
from manifests.apply import ApplyOptions, apply
from manifests.ownership import record_update
from reconciler.services.gitops import credentials
from reconciler.services.gitops.credentials import GitSettings
from reconciler.services.gitops.fetch_messages import FetchCredentials, FetchFailure
from schemas.gitsource import GitCredentials, GitSource
from store import objects
from store.memory import MemoryTransport
from store.port import Transport
from tests.support.gitrepo import Repository, pool
from tests.support.manifests_texts import read
from tests.support.reconciler_git_servers import over_http
from tests.support.reconciler_gitops import (
    CLOCK,
    applied,
    leading,
    places,
    ready,
    said,
    source,
    synced,
)

TOKEN = "  credentials: {username: anna, passwordFile: token}\n"


async def stored(text: str, manager: str = "fleetctl") -> GitSource:
    """Return a source as the store has it after its manifest was applied."""
    store = MemoryTransport(CLOCK)
    await apply(store, read(text), CLOCK, ApplyOptions(manager=manager))
    obj = await objects.get(store, GitSource, "a")
    assert obj is not None
    return obj


def places_with(root: Path, *files: str) -> GitSettings:
    for file in files:
        path = root / "credentials" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("geheim")
        path.chmod(0o600)
    return places(root)


@pytest.mark.parametrize(
    ("files", "repository", "reason", "told"),
    [
        pytest.param(
            ["token"], "https://git.example.com/x.git", "CredentialsRefused",
            "credentials.passwordFile: token is not bound to a host, so it is not sent to git.example.com. If it belongs there, run: mkdir -p {root}/credentials/git.example.com && mv {root}/credentials/token {root}/credentials/git.example.com/",
            id="unbound",
        ),
        pytest.param(
            ["git.example.com/token"], "https://evil.example/x.git", "CredentialsRefused",
            "credentials.passwordFile: token is bound to git.example.com, so it is not sent to evil.example", id="another-host",
        ),
        pytest.param(
            [], "https://git.example.com/x.git", "CredentialsMissing",
            "credentials.passwordFile: token is missing in the reconciler's --git-credentials folder: expected {root}/credentials/git.example.com/token. Every Mac that runs a reconciler needs it",
            id="missing",
        ),
    ],
)  # fmt: skip
async def test_a_credential_is_sent_to_its_host_only(
    tmp_path: Path, files: list[str], repository: str, reason: str, told: str
) -> None:
    made = await stored(source("a", repository, TOKEN))
    found = credentials.find(made, places_with(tmp_path, *files))
    assert found == FetchFailure(reason=reason, message=told.format(root=tmp_path))  # type: ignore[arg-type]  # a literal


async def test_a_bound_credential_is_found_for_every_form_of_its_host(tmp_path: Path) -> None:
    settings = places_with(tmp_path, "git.example.com/token")
    for address in (
        "https://Git.example.com:8443/x.git",
        "ssh://git@git.example.com/x",
        "git@git.example.com:x",
    ):
        found = credentials.find(await stored(source("a", address, TOKEN)), settings)
        assert isinstance(found, FetchCredentials)
        assert found.password_file == str(tmp_path / "credentials/git.example.com/token")
    nobody = credentials.find(await stored(source("a", "https://x.example/y")), settings)
    assert nobody == FetchCredentials()


async def test_a_source_out_of_git_gets_no_credentials(tmp_path: Path) -> None:
    settings = places_with(tmp_path, "git.example.com/token")
    allowed = replace(settings, credentials_from_git=True)
    text = source("a", "https://git.example.com/x.git", TOKEN)
    made = await stored(text, "gitsource/root")
    found = credentials.find(made, settings)
    assert isinstance(found, FetchFailure)
    assert found.reason == "CredentialsRefused"
    assert "start the reconcilers with --allow-credentials-from-git" in found.message
    assert isinstance(credentials.find(made, allowed), FetchCredentials)
    # Neither the end of the other source nor an apply of the same file makes them anybody's own.
    orphan = ownership.release_manifest(made, "gitsource/root")
    assert credentials.is_from_git(orphan)
    [item] = read(text)
    again = ownership.merge_manifest(
        made, item, manager="fleetctl", force=False, now=CLOCK.now(), uid=""
    ).obj
    assert isinstance(again, GitSource)
    assert credentials.is_from_git(again)


@pytest.mark.parametrize(
    ("repository", "trusted"),
    [
        ("https://git.example.com/x.git", ""),
        ("git@GIT.lan:x.git", "git.lan"),
        ("https://git.lan:8443/y.git", "git.lan"),
        ("file:///Users/anna/private", None),
        ("http://git.lan/x.git", None),
        ("git://git.lan/x.git", None),
    ],
)
async def test_a_source_out_of_git_may_name_public_hosts_and_its_parents(
    repository: str, trusted: str | None
) -> None:
    store = MemoryTransport(CLOCK)
    await applied(store, source("root", "https://git.lan/root.git"))
    text = source("a", repository)
    await apply(store, read(text), CLOCK, ApplyOptions(manager="gitsource/root"))
    made = await objects.get(store, GitSource, "a")
    assert made is not None
    found = await credentials.trusted_host(store, made)
    if trusted is None:
        assert isinstance(found, FetchFailure)
        assert found.reason == "RepositoryRefused"
    else:
        assert found == trusted
    assert await credentials.trusted_host(store, await stored(text)) is None


async def test_a_person_may_give_credentials_to_a_source_out_of_git() -> None:
    made = await stored(source("a", "https://git.example.com/x.git"), "gitsource/root")
    given = GitCredentials(password_file="token")
    changed = made.model_copy(update={"spec": made.spec.model_copy(update={"credentials": given})})
    patched = record_update(made, changed, "fleetctl-patch", CLOCK.now())
    assert not credentials.is_from_git(patched)


async def test_a_password_reaches_its_server_and_no_other(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "r.git")
    first = repo.commit({"a.yaml": pool("bound")})
    settings = places_with(tmp_path, "127.0.0.1/token", "unbound")
    store: Transport = MemoryTransport(CLOCK)
    with over_http(repo.repo, password="geheim") as url:
        async with leading(store, tmp_path, settings):
            await applied(store, source("bound", url, TOKEN))
            await ready(store, "bound", first)
            elsewhere = url.replace("127.0.0.1", "localhost")
            await applied(store, source("stolen", elsewhere, TOKEN))
            stalled = await said(store, "stolen", "Stalled", reason="CredentialsRefused")
            assert "token is bound to 127.0.0.1, so it is not sent to localhost" in stalled.message
            await applied(store, source("loose", url, TOKEN.replace("token", "unbound")))
            stalled = await said(store, "loose", "Stalled", reason="CredentialsRefused")
            assert "unbound is not bound to a host" in stalled.message
            # The command in the message is the way out.
            folder = tmp_path / "credentials"
            (folder / "unbound").rename(folder / "127.0.0.1" / "unbound")
            await synced(store, "loose")
            await said(store, "loose", "Stalled", reason="Refused", commit=first)
