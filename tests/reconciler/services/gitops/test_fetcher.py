"""The real fetch process against real servers on loopback, and against hostile repositories."""

import asyncio
import json
from pathlib import Path

import asyncssh
import pytest

from manifests.documents import Document
from manifests.yaml.parser import parse
from reconciler.services.gitops.fetch_messages import FetchCredentials, document_of, line_of
from tests.support.gitrepo import Repository, pool
from tests.support.ports import free_port
from tests.support.reconciler_fetch import fetched, message, reason
from tests.support.reconciler_git_servers import Keys, over_http, over_ssh, over_tcp
from tests.support.tcp_server import tcp_server


async def test_over_tcp_only_new_commits_are_fetched(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "r.git")
    first = repo.commit({"a.yaml": pool("a"), "b.yaml": pool("b")})
    with over_tcp(repo.repo) as url:
        result = await fetched(url, tmp_path / "cache")
        assert (result.answer.revision, message(result)) == (first, "")
        assert [document.source for document in result.documents] == ["a.yaml", "b.yaml"]
        again = await fetched(url, tmp_path / "cache", known=first)
        assert (again.answer.revision, again.documents) == (first, ())
        second = repo.commit({"a.yaml": None})
        result = await fetched(url, tmp_path / "cache", known=first)
        assert (result.answer.revision, message(result)) == (second, "")
        assert [document.source for document in result.documents] == ["b.yaml"]
    packs = list((tmp_path / "cache").glob("repository.git/objects/pack/*.pack"))
    assert len(packs) == 2
    # What a power cut left of the cache is thrown away.
    for pack in packs:
        pack.chmod(0o600)
        pack.write_bytes(pack.read_bytes()[:40])
    with over_tcp(repo.repo) as url:
        result = await fetched(url, tmp_path / "cache")
    assert (result.answer.revision, message(result)) == (second, "")


@pytest.mark.ci
async def test_over_http_a_password_goes_only_to_its_server(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "r.git")
    first = repo.commit({"a.yaml": pool("a")})
    secret = tmp_path / "token"
    secret.write_text("geheim-4711\n")
    secret.chmod(0o600)
    who = FetchCredentials(username="anna", password_file=str(secret))
    with over_http(repo.repo, password="geheim-4711") as url:
        result = await fetched(url, tmp_path / "cache", who=who)
        assert (result.answer.revision, message(result)) == (first, "")
        nobody = await fetched(url, tmp_path / "cache2")
        assert reason(nobody) == "AuthenticationFailed"
        secret.chmod(0o644)
        readable = await fetched(url, tmp_path / "c6", who=who)
        assert reason(readable) == "CredentialsRefused"
        assert f"Run `chmod 600 {secret}`" in message(readable)
        secret.chmod(0o600)
        secret.write_text("falsch-4712")
        wrong = await fetched(url, tmp_path / "cache3", who=who)
    assert reason(wrong) == "AuthenticationFailed"
    assert "falsch-4712" not in wrong.answer.model_dump_json()
    assert "ZmFsc2No" not in wrong.answer.model_dump_json()
    plain = await fetched("http://git.example.com/fleet.git", tmp_path / "cache4", who=who)
    assert "would travel unencrypted" in message(plain)
    gone = await fetched(
        url, tmp_path / "c5", who=FetchCredentials(password_file=str(tmp_path / "no"))
    )
    assert reason(gone) == "CredentialsMissing"
    assert "no cannot be read in the reconciler's --git-credentials folder" in message(gone)


@pytest.mark.ci
async def test_over_ssh_server_and_client_authenticate(tmp_path: Path) -> None:
    repo, keys = Repository(tmp_path / "r.git"), Keys(tmp_path / "keys")
    first = repo.commit({"a.yaml": pool("a")})
    files = FetchCredentials(ssh_key_file=str(keys.key_file), known_hosts_file=str(keys.hosts_file))
    async with over_ssh(repo.repo, keys) as port:
        url = f"ssh://git@127.0.0.1:{port}/fleet.git"
        keys.know(port, keys.host)
        result = await fetched(url, tmp_path / "cache", who=files)
        assert (result.answer.revision, message(result)) == (first, "")
        second = repo.commit({"a.yaml": pool("a", priority=3)})
        result = await fetched(url, tmp_path / "cache", who=files)
        assert (result.answer.revision, message(result)) == (second, "")
        keys.know(port, keys.person)
        stranger = await fetched(url, tmp_path / "cache", who=files)
        assert reason(stranger) == "HostKeyRefused"
        keys.know(port, keys.host)
        keys.key_file.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
        refused = await fetched(url, tmp_path / "cache", who=files)
        assert reason(refused) == "AuthenticationFailed"
        keys.key_file.write_text("no key at all")
        nonsense = await fetched(url, tmp_path / "cache", who=files)
        assert reason(nonsense) == "AuthenticationFailed"
        assert "no key at all" not in message(nonsense)
    unknown = await fetched(
        url, tmp_path / "cache", who=FetchCredentials(ssh_key_file=files.ssh_key_file)
    )
    assert "credentials.knownHostsFile" in message(unknown)


def test_a_document_travels_with_the_places_of_its_fields() -> None:
    text = pool("a", priority=3)
    (root,) = parse(text, "a.yaml").documents
    line = line_of(Document(source="a.yaml", root=root)).encode()
    there = document_of(line)
    assert there.text_at("metadata", "name") == "a"
    for path in (("spec", "priority"), ("metadata", "labels"), ("spec", "missing")):
        assert there.problem(path, "x") == Document(source="a.yaml", root=root).problem(path, "x")
    # Broken places cost the line number only.
    source, tree, _ = json.loads(line)
    broken = document_of(json.dumps([source, tree, "[1"]).encode())
    assert (broken.tree, broken.problem(("spec",), "x").line) == (tree, 1)
    with pytest.raises(ValueError, match="not a document"):
        document_of(b"1")


@pytest.mark.ci
async def test_no_server(tmp_path: Path) -> None:
    port = free_port()
    for scheme in ("git", "http"):
        result = await fetched(f"{scheme}://127.0.0.1:{port}/fleet.git", tmp_path / "cache")
        assert reason(result) == "Unreachable"
        assert "refused" in message(result).lower()


async def test_a_silent_server_times_out(tmp_path: Path) -> None:
    async def silent(_reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async with tcp_server(silent) as port:
        url = f"git://127.0.0.1:{port}/fleet.git"
        result = await fetched(url, tmp_path / "cache", timeout_s=3.0)
    assert reason(result) == "TimedOut"
    assert message(result) == f"{url} did not answer within 3 s (spec.timeout)"
