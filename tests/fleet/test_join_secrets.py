"""Keys, passwords and tokens of a fleet that others join appear nowhere but where they lie; signers may die meanwhile."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from identity.authority import identity_of, load_certificate
from identity.folder import IdentityFolder
from machinery import processes
from store.etcd import users
from tests.support.canaries import leaks, parts_of
from tests.support.two_macs import MARKS, Mac, joined, two_macs

pytestmark = [*MARKS, pytest.mark.timeout(300)]

# The folders in which secrets lie. etcd has passwords as hashes.
PLACES = ("authority", "passwords", "identities", "identity", "etcd")


@pytest.fixture
async def macs(tmp_path: Path) -> AsyncIterator[tuple[Mac, Mac]]:
    (tmp_path / "models").mkdir()
    async with two_macs(tmp_path, tmp_path / "models") as (first, second):
        await first.up("--log-level", "debug")
        yield first, second


@dataclass(slots=True)
class Witness:
    """Argv and environment of all processes of the machines, as other users see them."""

    root: Path
    argv: set[str] = field(default_factory=set)
    environment: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._watch())
            yield
            task.cancel()

    async def _watch(self) -> None:
        while True:
            for process in psutil.process_iter():
                try:
                    line = " ".join(process.cmdline())
                    if str(self.root) in line:
                        self.argv.add(line)
                        text = Path(f"/proc/{process.pid}/environ").read_text(errors="replace")
                        self.environment.add(text)
                except (psutil.Error, OSError):
                    continue
            await asyncio.sleep(0.1)


def key_line(pem: str) -> str:
    """Return a line from the middle of the first private key, which no other text has by chance."""
    body = pem.partition("PRIVATE KEY-----")[2].partition("-----END")[0]
    lines = [line for line in body.split() if len(line) > 20]
    return lines[1]


def canaries(first: Mac, second: Mac, token: str) -> dict[str, str]:
    """Return all secrets of the fleet."""
    found = {"token": token, "token secret": token.rpartition(".")[2]}
    found["authority's key"] = key_line((first.data / "authority" / "ca.key").read_text())
    for file in (*first.root.rglob("identity.pem"), *second.root.rglob("identity.pem")):
        identity = identity_of(load_certificate(IdentityFolder(file.parent).certificate()))
        found[f"key of {identity.role}/{identity.name}"] = key_line(file.read_text())
    files = [*first.data.rglob("*.env"), *second.root.rglob("etcd.env")]
    found |= {f"password in {file.name}": users.read_credentials(file).password for file in files}
    return found


async def outputs(first: Mac, folder: Path) -> dict[str, str]:
    """Return what commands print and write about the fleet."""
    kinds = "nodes,nodepools,modeldeployments,replicas,events,apikeys"
    commands: list[tuple[str, ...]] = [("get", kinds, "-o", form) for form in ("yaml", "json")]
    commands += [("describe", "nodes"), ("secure", "status"), ("token", "list"), ("cert", "list")]
    commands += [("doctor",), ("logs", "node/mac-2"), ("version",)]
    shown = {}
    for words in commands:
        done = await first.run(*words, "--data-dir", str(first.data))
        shown[" ".join(words)] = done.out + done.err
    bundle, backup = folder / "bundle.tar.gz", folder / "backup"
    await first.ok("support-bundle", "-o", str(bundle))
    authority = ("--with-ca", "--authority-dir", str(first.data / "authority"))
    passphrase = folder / "passphrase"
    passphrase.touch(mode=0o600)
    passphrase.write_text("a passphrase of decent length")
    await first.ok("backup", str(backup), *authority, "--passphrase-file", str(passphrase))
    return {**shown, **dict(parts_of(bundle, backup))}


def files_of(root: Path) -> Iterator[tuple[str, str]]:
    """Yield every file that the machines wrote, except those in which the secrets lie."""
    for path in root.rglob("*"):
        if path.is_file() and not set(path.relative_to(root).parts[:-1]) & set(PLACES):
            yield str(path), path.read_bytes().decode(errors="replace")


async def test_no_key_password_or_token_leaves_its_place(
    tmp_path: Path, macs: tuple[Mac, Mac]
) -> None:
    first, second = macs
    witness = Witness(tmp_path)
    async with witness.watching():
        token = await joined(first, second)
        shown = await outputs(first, tmp_path)
    secrets = canaries(first, second, token)
    assert len(secrets) >= 3 + 7 + 7
    assert all(len(value) >= 20 for value in secrets.values())
    assert len(witness.argv) > 6
    assert leaks(secrets, [("argv", "\n".join(witness.argv))]) == []
    assert leaks(secrets, [("environment", "\n".join(witness.environment))]) == []
    assert leaks(secrets, shown.items()) == []
    assert leaks(secrets, files_of(tmp_path)) == []
    # The search finds what is there.
    places = [(str(path), path.read_text()) for path in first.data.rglob("*.key")]
    assert leaks(secrets, places) == [f"authority's key in {first.data}/authority/ca.key"]


async def test_a_signer_that_is_killed_again_and_again_lets_every_machine_join_once(
    macs: tuple[Mac, Mac],
) -> None:
    first, second = macs
    names = [f"mac-{number}" for number in range(2, 8)]
    uses = ("--uses", str(len(names)), "-o", "token")
    token = (await first.ok("token", "create", *uses)).strip()
    ended = asyncio.Event()

    async def kill_signers() -> int:
        kills = 0
        while not ended.is_set():
            record = processes.load_record(first.data / "run" / "reconciler.pid")
            if record is not None and processes.is_running(record):
                os.kill(record.pid, signal.SIGKILL)
                kills += 1
            # Long enough for a start, and for some of the joins.
            await asyncio.sleep(4.0)
        return kills

    async def join(name: str) -> None:
        folder = second.root / name / "identity"
        words = ("join", "-", f"{first.address}:4002", "--name", name)
        done = await second.run(*words, "--identity-dir", str(folder), stdin=token.encode())
        assert done.code == 0, done.err
        assert (folder / "identity.pem").exists()

    async with asyncio.TaskGroup() as group:
        killing = group.create_task(kill_signers())
        async with asyncio.TaskGroup() as joins:
            for name in names:
                joins.create_task(join(name))
        ended.set()
    assert await killing >= 1
    issued = await first.ok("cert", "list")
    assert all(f"node/{name}" in issued for name in names), issued
    # Every use is gone, and none was taken twice.
    late = ("join", "-", f"{first.address}:4002", "--name", "late", "--timeout", "5")
    folder = ("--identity-dir", str(second.root / "late"))
    refused = await second.run(*late, *folder, stdin=token.encode())
    assert refused.code == 1, refused.out
    assert not (second.root / "late" / "identity.pem").exists()
