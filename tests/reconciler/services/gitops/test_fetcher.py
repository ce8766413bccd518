"""The real fetch process against real servers on loopback, and against hostile repositories: nothing of them gets out."""

import asyncio
import hashlib
import json
import ssl
import struct
import zlib
from pathlib import Path

import asyncssh
import pytest
from dulwich.objects import Blob, ObjectID, Tree

from machinery.clock import SystemClock
from manifests.documents import Document
from manifests.yaml.parser import parse
from reconciler.services.gitops.fetch_messages import (
    FetchCredentials,
    FetchFailure,
    FetchRequest,
    document_of,
    line_of,
)
from reconciler.services.gitops.fetch_process import egress
from reconciler.services.gitops.fetch_process.commit_tree import CommitTree
from reconciler.services.gitops.fetch_process.errors import FetchError
from reconciler.services.gitops.fetch_process.repository import commit_of
from reconciler.services.gitops.fetcher import FetchResult, fetch
from tests.support.gitrepo import Link, Module, Repository, pool
from tests.support.ports import free_port
from tests.support.reconciler_git_servers import Keys, over_http, over_ssh, over_tcp
from tests.support.store_certificates import Authority
from tests.support.tcp_server import tcp_server


async def fetched(
    repository: str,
    cache: Path,
    *,
    path: str = "",
    known: str | None = None,
    timeout_s: float = 60.0,
    who: FetchCredentials | None = None,
    trusted_host: str | None = None,
) -> FetchResult:
    ask = FetchRequest(
        repository=repository,
        branch="main",
        path=path,
        cache=str(cache),
        credentials=who or FetchCredentials(),
        trusted_host=trusted_host,
        known=known,
        timeout_s=timeout_s,
    )
    return await fetch(ask, SystemClock())


def reason(found: FetchResult) -> str:
    return "" if found.answer.failure is None else found.answer.failure.reason


def message(found: FetchResult) -> str:
    return "" if found.answer.failure is None else found.answer.failure.message


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


@pytest.mark.parametrize(
    ("files", "said"),
    [
        pytest.param({"a.yaml": Link("/etc/passwd")}, "a.yaml: is a symbolic link, which is not followed", id="link-out"),
        pytest.param(
            {"a.yaml": pool("a"), "sites/x": Link("../base"), "base/b.yaml": pool("b")},
            "sites/x: is a symbolic link, which is not followed", id="link-to-a-folder",
        ),
        pytest.param({"a.yaml": pool("a"), "vendor": Module()}, "vendor: is a submodule, which is not fetched", id="submodule"),
        pytest.param({"a.yaml": "a: 1\n" + "# much\n" * 700_000}, "a.yaml: is too large for a manifest", id="large-file"),
        pytest.param({"a.yaml": b"\xff\x00"}, "a.yaml: is not UTF-8", id="no-text"),
        pytest.param(
            {"a.yaml": "a: &a [x, x]\n" + "".join(f"b{n}: [*a, *a]\n" for n in range(30_000))},
            "the file holds more than 100,000 values", id="aliases",
        ),
    ],
)  # fmt: skip
def test_strange_trees_are_refused(
    tmp_path: Path, files: dict[str, str | bytes | Link | Module], said: str
) -> None:
    repo = Repository(tmp_path / "r.git")
    commit = repo.commit({"ok.yaml": pool("ok"), **files})
    failure = refused(repo, commit)
    assert failure.reason == "BrokenManifests"
    assert said in failure.message


def read(repo: Repository, commit: str) -> list[str]:
    """Return the manifest files of a commit."""
    files = CommitTree(repo.repo, commit_of(repo.repo, commit.encode()), repo.url)
    return [document.source for document in files.documents("").documents]


def refused(repo: Repository, commit: str) -> FetchFailure:
    with pytest.raises(FetchError) as caught:
        read(repo, commit)
    return caught.value.failure


def test_links_that_are_no_manifests_are_ignored(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "r.git")
    commit = repo.commit(
        {"a.yaml": pool("a"), "README.md": "x", "docs/README": Link("../README.md")}
    )
    assert read(repo, commit) == ["a.yaml"]


def test_names_that_would_escape_are_only_names(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "r.git")
    blob = Blob.from_string(pool("a").encode())
    inner, tree = Tree(), Tree()
    inner.add(b"evil.yaml", 0o100644, blob.id)
    tree.add(b"..", 0o040000, inner.id)
    tree.add(b"a.yaml", 0o100644, blob.id)
    for one in (blob, inner, tree):
        repo.repo.object_store.add_object(one)
    assert read(repo, repo.commit_tree(tree.id)) == ["a.yaml"]
    assert list(tmp_path.rglob("*.yaml")) == []


@pytest.mark.ci
def test_a_tree_that_repeats_itself_is_counted(tmp_path: Path) -> None:
    """Ten names for the same folder, ten levels deep: ten thousand million files in a kilobyte."""
    repo = Repository(tmp_path / "r.git")
    blob = Blob.from_string(pool("a").encode())
    repo.repo.object_store.add_object(blob)
    below, mode = ObjectID(blob.id), 0o100644
    for _ in range(10):
        tree = Tree()
        for name in range(10):
            suffix = b".yaml" if mode == 0o100644 else b""
            tree.add(b"%d%s" % (name, suffix), mode, below)
        repo.repo.object_store.add_object(tree)
        below, mode = ObjectID(tree.id), 0o040000
    assert refused(repo, repo.commit_tree(below)).reason == "TooLarge"


@pytest.mark.ci
async def test_a_pack_bomb_ends_only_the_process(tmp_path: Path) -> None:
    """A delta that copies sixteen megabytes of zeros 256 times: four gigabytes in seventeen kilobytes."""
    async with tcp_server(_serve_bomb) as port:
        result = await fetched(f"git://127.0.0.1:{port}/fleet.git", tmp_path / "cache")
    assert reason(result) == "TooLarge", message(result)


_SHA = b"1" * 40


async def _serve_bomb(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Speak the oldest protocol: one branch with the bomb."""
    writer.write(_line(_SHA + b" refs/heads/main\0shallow ofs-delta\n") + b"0000")
    await reader.readuntil(b"done\n")
    writer.write(_line(b"shallow " + _SHA) + b"0000" + _line(b"NAK\n"))
    writer.write(_bomb())
    await writer.drain()


def _line(text: bytes) -> bytes:
    return b"%04x" % (len(text) + 4) + text


def _bomb() -> bytes:
    zeros, copies = 0xFFFFFF, 256
    blob = _header(3, zeros) + zlib.compress(bytes(zeros))
    delta = _number(zeros) + _number(zeros * copies) + b"\xf0\xff\xff\xff" * copies
    entry = _header(6, len(delta)) + _offset(len(blob)) + zlib.compress(delta)
    pack = b"PACK" + struct.pack(">II", 2, 2) + blob + entry
    return pack + hashlib.sha1(pack).digest()


def _header(kind: int, size: int) -> bytes:
    """Return the kind and size before an object of a pack."""
    first, size = kind << 4 | size & 15, size >> 4
    return bytes([first | 0x80 if size else first]) + (_number(size) if size else b"")


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _offset(value: int) -> bytes:
    out = [value & 127]
    while value := value >> 7:
        value -= 1
        out.insert(0, value & 127 | 128)
    return bytes(out)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *[(one, True) for one in ("140.82.121.4", "2606:50c0:8000::153", "64:ff9b::8c52:7904")],
        *[
            (one, False)
            for one in ("127.0.0.1", "10.1.2.3", "169.254.169.254", "100.64.0.1", "0.0.0.0")
        ],
        *[
            (one, False)
            for one in ("::1", "fe80::1%en0", "fd00::1", "::ffff:127.0.0.1", "224.0.0.1")
        ],
        *[(one, False) for one in ("64:ff9b::7f00:1", "2002:7f00:1::", "localhost", "/tmp/socket")],
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert egress.is_public(address) is public


@pytest.mark.ci
async def test_a_source_out_of_git_reaches_no_private_address(tmp_path: Path) -> None:
    """Neither by its number, nor by a name, nor by a redirect of its parent's own server."""
    calls = {"private": 0, "parent": 0}

    async def private(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls["private"] += 1

    async def parent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls["parent"] += 1
        await reader.readuntil(b"\r\n\r\n")
        place = f"https://127.0.0.2:{port}/fleet.git/info/refs?service=git-upload-pack"
        head = f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()

    authority = Authority(tmp_path, "authority")
    server = authority.issue("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(server.certificate, server.key)
    who = FetchCredentials(ca_file=str(authority.certificate))
    async with tcp_server(private) as port, tcp_server(parent, context=context) as https:
        for place, trusted in (
            (f"127.0.0.1:{port}", ""),
            (f"localhost:{port}", ""),
            (f"127.0.0.1:{https}", "127.0.0.1"),
        ):
            result = await fetched(
                f"https://{place}/fleet.git", tmp_path / "cache", who=who, trusted_host=trusted
            )
            assert reason(result) == "RepositoryRefused", message(result)
            assert "is not a public address" in message(result)
    assert calls == {"private": 0, "parent": 1}
