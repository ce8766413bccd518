"""The webhook of a real reconciler process: what a push requests, and what strangers get."""

import asyncio
import hashlib
import hmac
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from manifests.apply import ApplyOptions, apply
from reconciler.services.gitops import webhook
from schemas.gitsource import SYNC_REQUESTED, GitSource, repository_address
from store import objects
from store.etcd.connect import connect
from store.memory import MemoryTransport
from store.port import Transport
from tests.support.etcd import running_etcd
from tests.support.manifests_texts import read
from tests.support.ports import free_port
from tests.support.reconciler_gitops import CLOCK, source
from tests.support.waiting import until_async

SECRET = "5a1de3c0ffee4711d1ce"
MAIN = "refs/heads/main"


def push(url: str = "https://git.example.com/anna/fleet.git", ref: str = MAIN) -> bytes:
    return json.dumps({"ref": ref, "repository": {"clone_url": url}}).encode()


def signed(body: bytes, secret: str = SECRET) -> dict[str, str]:
    digest = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    return {"x-hub-signature-256": f"sha256={digest}"}


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "hook"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
async def store() -> Transport:
    transport = MemoryTransport(CLOCK)
    for name, url, more in (
        ("https", "https://git.example.com/anna/fleet.git", ""),
        ("ssh", "ssh://git@GIT.example.com:2222/anna/fleet", ""),
        ("scp", "git@git.example.com:anna/fleet.git", "  reference: {branch: next}\n"),
        ("other", "https://git.example.com/anna/other.git", ""),
        ("elsewhere", "https://git.example.org/anna/fleet.git", ""),
    ):
        await apply(transport, read(source(name, url, more)), CLOCK, ApplyOptions())
    return transport


@pytest.fixture
async def client(store: Transport, secret_file: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = webhook.Webhook(store, CLOCK, secret_file).app()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://hook") as made:
        yield made


async def requested(store: Transport) -> list[str]:
    """Return the sources of which a sync is requested."""
    git_sources = await objects.list_all(store, GitSource)
    return sorted(
        git_source.name
        for git_source in git_sources
        if SYNC_REQUESTED in git_source.metadata.annotations
    )


async def test_a_push_requests_the_sources_of_its_repository_and_branch(
    client: httpx.AsyncClient, store: Transport
) -> None:
    answer = await client.post("/hooks/git", content=push(), headers=signed(push()))
    assert (answer.status_code, answer.json()) == (202, {"requested": ["https", "ssh"]})
    assert await requested(store) == ["https", "ssh"]
    body = push(ref="refs/heads/next")
    answer = await client.post("/hooks/git", content=body, headers=signed(body))
    assert answer.json() == {"requested": ["scp"]}
    body = push("https://git.example.com/nobody/there.git")
    answer = await client.post("/hooks/git", content=body, headers=signed(body))
    assert (answer.status_code, answer.json()) == (202, {"requested": []})


async def test_each_server_proves_itself_in_its_own_way(client: httpx.AsyncClient) -> None:
    digest = signed(push())["x-hub-signature-256"].removeprefix("sha256=")
    gitlab = json.dumps(
        {"ref": MAIN, "project": {"git_http_url": "https://git.example.com/anna/fleet.git"}}
    )
    form = b"payload=" + push().replace(b" ", b"+")
    kind = {"content-type": "application/x-www-form-urlencoded"}
    for body, headers in (
        (push(), {"x-gitea-signature": digest}),
        (push(), {"x-forgejo-signature": digest}),
        (gitlab.encode(), {"x-gitlab-token": SECRET}),
        (form, {**signed(form), **kind}),
    ):
        answer = await client.post("/hooks/git", content=body, headers=headers)
        assert (answer.status_code, answer.json()) == (202, {"requested": ["https", "ssh"]})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        signed(push(), "another secret of 16"),
        signed(push() + b" "),
        {"x-hub-signature-256": "sha256="},
        {"x-hub-signature-256": "sha1=00"},
        {"x-hub-signature": "sha1=00"},
        {"x-gitlab-token": ""},
        {"x-gitlab-token": SECRET[:-1]},
        {"x-gitlab-token": "é"},
        {"x-gitea-signature": "ü"},
    ],
)
async def test_a_stranger_changes_nothing(
    client: httpx.AsyncClient, store: Transport, headers: dict[str, str]
) -> None:
    raw = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
    answer = await client.post("/hooks/git", content=push(), headers=raw)
    assert answer.status_code == 401
    assert SECRET not in answer.text
    assert await requested(store) == []
    assert (await client.get("/hooks/git")).status_code == 405
    assert (await client.get("/")).status_code == 404


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"[" * 100_000, "the body is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"{}", "names no repository"),
        (b'{"repository": {"clone_url": "https://../x"}}', "names no repository"),
        (b'{"repository": {"clone_url": "http://[::1/x"}}', "names no repository"),
        (b"\xff\xfe\x00", "the body is not JSON"),
    ],
)
async def test_a_signed_body_that_is_no_push_is_refused(
    client: httpx.AsyncClient, body: bytes, told: str
) -> None:
    answer = await client.post("/hooks/git", content=body, headers=signed(body))
    assert answer.status_code == 400
    assert told in answer.json()["error"]


async def test_bodies_and_rates_are_bounded(client: httpx.AsyncClient) -> None:
    large = b" " * (2 * 2**20 + 1)
    answer = await client.post("/hooks/git", content=large, headers=signed(large))
    assert answer.status_code == 413

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 2**16

    answer = await client.post("/hooks/git", content=pieces(), headers=signed(b""))
    assert answer.status_code == 413
    codes = [
        (await client.post("/hooks/git", content=push(), headers=signed(push()))).status_code
        for _ in range(40)
    ]
    assert codes[0] == 202
    assert codes[-1] == 429


async def test_a_secret_is_changed_without_a_restart(
    client: httpx.AsyncClient, secret_file: Path
) -> None:
    later = "another secret!!".replace(" ", "-")
    secret_file.write_text(f"{SECRET}\n{later}\n")
    for one in (SECRET, later):
        answer = await client.post("/hooks/git", content=push(), headers=signed(push(), one))
        assert answer.status_code == 202
    secret_file.write_text("short")
    answer = await client.post("/hooks/git", content=push(), headers=signed(push(), "short"))
    assert answer.status_code == 503


def test_a_secret_that_others_can_read_is_refused(secret_file: Path) -> None:
    assert webhook.read_secrets(secret_file) == [SECRET.encode()]
    secret_file.chmod(0o644)
    with pytest.raises(webhook.SecretError, match="chmod 600"):
        webhook.read_secrets(secret_file)


@pytest.mark.parametrize(
    ("address", "host", "path"),
    [
        ("https://git.example.com:8443/A/b.git", "git.example.com", "a/b"),
        ("ssh://git@Git.example.com/a/b", "git.example.com", "a/b"),
        ("git@git.example.com:a/b.git", "git.example.com", "a/b"),
        ("https://[fd00::1]:443/a", "fd00::1", "a"),
        ("https://../a", "", "a"),
        ("https://.hidden/a", "", "a"),
        ("file:///srv/a.git", "", "/srv/a.git"),
    ],
)
def test_addresses_are_compared_by_host_and_path(address: str, host: str, path: str) -> None:
    assert repository_address(address) == (host, path)


@asynccontextmanager
async def reconciler(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "reconciler", *flags),
        env={**os.environ, "HOME": "/nonexistent"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


@pytest.mark.ci
@pytest.mark.etcd
async def test_a_reconciler_process_receives_pushes(tmp_path: Path, secret_file: Path) -> None:
    async with running_etcd(tmp_path / "etcd") as etcd:
        transport = connect(etcd.address)
        text = source("hooked", "https://git.invalid/anna/fleet.git", "  suspend: true\n")
        await apply(transport, read(text), CLOCK, ApplyOptions())
        port = free_port()
        flags = ("--etcd", str(etcd.address), "--git-dir", str(tmp_path / "git"))
        hook = ("--git-webhook-secret-file", str(secret_file), "--api-port", str(port))
        async with reconciler(*flags, *hook), httpx.AsyncClient() as client:
            body = push("https://git.invalid/anna/fleet.git")

            async def answered() -> httpx.Response | None:
                try:
                    return await client.post(
                        f"http://127.0.0.1:{port}/hooks/git", content=body, headers=signed(body)
                    )
                except httpx.ConnectError:
                    return None

            answer = await until_async(answered, limit_s=40.0, what="an answer of the webhook")
            assert (answer.status_code, answer.json()) == (202, {"requested": ["hooked"]})
        assert await requested(transport) == ["hooked"]
        await transport.close()
        secret_file.write_text("short\n")
        async with reconciler(*flags, *hook) as process:
            assert process.stderr is not None
            told = (await process.stderr.read()).decode()
        assert "expected a secret of 16 characters or more" in told
