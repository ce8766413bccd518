"""Tests of `store.etcd.member.embedded`: start, adoption, restart, stop, and access by its owner only."""

import asyncio
import os
import shutil
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from machinery.clock import SystemClock
from machinery.unix_sockets import SocketFolderError
from store.etcd.connect import connect
from store.etcd.member.binary import Binary, Version, locate
from store.etcd.member.embedded import EmbeddedEtcd, EmbeddedEtcdError, command, failure_reason
from store.etcd.member.sockets import client_socket, make_socket_folder, socket_folder
from store.port import Put
from tests.support.etcd import running_etcd
from tests.support.waiting import until


@pytest.mark.parametrize("version", [(3, 4, 23), (3, 5, 1), (3, 5, 16)])
def test_only_affected_versions_get_the_mitigation_of_13766(version: Version) -> None:
    line = command(Binary(path=Path("/etcd"), version=version), Path("/data"), "token")
    mitigated = {part.partition("=")[0] for part in line} & {
        "--backend-batch-interval",
        "--backend-batch-limit",
    }
    assert bool(mitigated) == (version == (3, 5, 1))
    assert line[:3] == ("/etcd", "--name=embedded", "--data-dir=/data")
    assert not [part for part in line if "http:" in part]


@pytest.mark.parametrize("version", [(3, 4, 23), (3, 5, 16), (3, 6, 0), (3, 7, 1)])
def test_every_version_gets_known_flags_only(version: Version) -> None:
    """etcd 3.7 ends with an error when it is given an `--experimental-` flag (etcd #19959)."""
    line = command(Binary(path=Path("/etcd"), version=version), Path("/data"), "token", 2**30)
    assert f"--quota-backend-bytes={2**30}" in line
    flags = {part.partition("=")[0] for part in line}
    experimental = {flag for flag in flags if flag.startswith("--experimental-")}
    assert bool(experimental) == (version < (3, 6, 0))
    assert ("--watch-progress-notify-interval" in flags) == (version >= (3, 6, 0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", "", id="nothing"),
        pytest.param("one\ntwo\n", "one | two", id="no-panic"),
        pytest.param(
            '{"level":"panic","msg":"failed to create WAL","error":"no space left on device",'
            '"stacktrace":"main.main"}\npanic: failed to create WAL\n\ngoroutine 1:\nmain.main()\n',
            "failed to create WAL: no space left on device",
            id="panic",
        ),
        pytest.param(
            '{"level":"fatal","msg":"discovery failed"}\n', "discovery failed", id="fatal"
        ),
        pytest.param("panic: oh\n\ngoroutine 1:\nmain\n", "panic: oh", id="of-gos-own"),
        pytest.param('{"level":"fatal","msg', '{"level":"fatal","msg', id="cut"),
    ],
)
def test_the_failure_reason_is_the_panic_message(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "log").write_text(text)
    assert failure_reason(tmp_path / "log") == expected


def remade(etcd: EmbeddedEtcd, data_dir: Path) -> EmbeddedEtcd:
    """Return the etcd of a restarted parent with the same folder."""
    binary = Path(etcd.supervisor.program.command[0])
    return EmbeddedEtcd(locate(binary), data_dir, SystemClock(), ready_s=3.0)


async def put(etcd: EmbeddedEtcd, key: str) -> None:
    transport = connect(etcd.address)
    await transport.commit([], [Put(key=key, value=b"v")])
    await transport.close()


async def kill(etcd: EmbeddedEtcd) -> None:
    assert etcd.supervisor.pid
    os.kill(etcd.supervisor.pid, signal.SIGKILL)
    await until(lambda: not etcd.supervisor.running)


@pytest.mark.etcd
async def test_a_restarted_parent_adopts_the_running_member(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    await put(etcd, "/a")
    successor = remade(etcd, tmp_path)
    await successor.start()
    assert successor.supervisor.pid == etcd.supervisor.pid
    await put(successor, "/b")
    await successor.supervisor.stop()
    await until(lambda: not etcd.supervisor.running)


@pytest.mark.etcd
async def test_a_frozen_orphan_is_restarted(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    await put(etcd, "/a")
    pid = etcd.supervisor.pid
    assert pid
    os.kill(pid, signal.SIGSTOP)
    successor = remade(etcd, tmp_path)
    await successor.start()
    assert successor.supervisor.pid != pid
    await until(lambda: not etcd.supervisor.running)
    transport = connect(successor.address)
    assert await transport.get("/a") is not None
    await transport.close()
    await successor.supervisor.stop()


@pytest.mark.etcd
async def test_a_kill_loses_no_acknowledged_write(etcd: EmbeddedEtcd) -> None:
    rounds = 2 if not locate(None).warning else 1
    transport = connect(etcd.address)
    acknowledged: dict[str, int] = {}

    async def write(worker: int, turn: int) -> None:
        for n in range(20):
            key = f"/acked/{turn}/{worker}/{n}"
            acknowledged[key] = await transport.commit([], [Put(key=key, value=b"v")])

    for turn in range(rounds):
        async with asyncio.TaskGroup() as group:
            for worker in range(16):
                group.create_task(write(worker, turn))
        await kill(etcd)
        await etcd.start()
        listing = await transport.list("/acked/")
        assert {item.key: item.mod_revision for item in listing.items} == acknowledged
    await transport.close()


@pytest.mark.etcd
async def test_only_the_owners_socket_accepts_connections(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    await put(etcd, "/a")
    assert etcd.supervisor.pid
    assert psutil.Process(etcd.supervisor.pid).net_connections(kind="inet") == []
    assert etcd.address.socket == client_socket(tmp_path)
    assert stat.S_IMODE(socket_folder(tmp_path).stat().st_mode) == 0o700


@pytest.mark.etcd
async def test_a_stop_is_clean_and_final(etcd: EmbeddedEtcd) -> None:
    record = etcd.supervisor.program.record
    assert record.exists()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(etcd.supervisor.run())
        await etcd.supervisor.stop()
    assert (etcd.supervisor.running, record.exists()) == (False, False)


@pytest.fixture
async def deep(tmp_path: Path) -> AsyncIterator[Path]:
    """A data folder whose path is too long for a socket."""
    path = tmp_path / ("deep-" * 20)
    yield path
    shutil.rmtree(socket_folder(path), ignore_errors=True)


@pytest.mark.etcd
async def test_a_deep_data_folder_has_its_sockets_in_a_temporary_folder(deep: Path) -> None:
    assert not socket_folder(deep).is_relative_to(deep)
    etcd = EmbeddedEtcd(locate(None), deep, SystemClock())
    await etcd.start()
    await put(etcd, "/a")
    await etcd.supervisor.stop()


@pytest.mark.etcd
async def test_stale_sockets_do_not_prevent_a_start(tmp_path: Path) -> None:
    etcd = EmbeddedEtcd(locate(None), tmp_path, SystemClock())
    for name in ("client:1", "peer:1"):
        (socket_folder(tmp_path) / name).touch()
    await etcd.start()
    await kill(etcd)
    assert client_socket(tmp_path).exists()  # a killed etcd leaves it behind
    await etcd.start()
    await put(etcd, "/a")
    await etcd.supervisor.stop()


def test_a_socket_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "sock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SocketFolderError, match="belongs to another user"):
        make_socket_folder(tmp_path)
    with pytest.raises(SocketFolderError):
        client_socket(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_socket_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(make_socket_folder(tmp_path), 12345, -1)
    with pytest.raises(SocketFolderError, match="choose another --data-dir"):
        EmbeddedEtcd(Binary(path=Path("/etcd"), version=(3, 5, 9)), tmp_path, SystemClock())


@pytest.mark.etcd
async def test_a_damaged_data_folder_is_reported_with_etcds_message(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    await put(etcd, "/a")
    await etcd.supervisor.end()
    for wal in (tmp_path / "member" / "member" / "wal").glob("*.wal"):
        wal.write_bytes(os.urandom(4096))
    successor = remade(etcd, tmp_path)
    with pytest.raises(EmbeddedEtcdError, match=r"last message: .*(?i:wal|crc|unexpected|panic)"):
        await successor.start()
    assert not successor.supervisor.running


@pytest.mark.etcd
async def test_a_program_that_cannot_start_is_named(tmp_path: Path) -> None:
    etcd = EmbeddedEtcd(
        Binary(path=Path("/nowhere/etcd"), version=(3, 5, 9)), tmp_path, SystemClock()
    )
    with pytest.raises(EmbeddedEtcdError, match=r"cannot be started.*/nowhere/etcd"):
        await etcd.start()


@pytest.mark.etcd
async def test_a_program_that_never_answers_times_out(tmp_path: Path) -> None:
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\necho I am no etcd >&2\nexec sleep 60\n")
    mute.chmod(0o700)
    etcd = EmbeddedEtcd(Binary(path=mute, version=(3, 5, 9)), tmp_path, SystemClock(), ready_s=0.5)
    with pytest.raises(EmbeddedEtcdError, match="I am no etcd"):
        await etcd.start()
    await until(lambda: not etcd.supervisor.running)


async def test_two_stores_have_different_ids(tmp_path: Path) -> None:
    """Not even the next store in the same folder: watchers must notice a wiped store."""
    stores = []
    for _ in range(2):
        async with running_etcd(tmp_path / "data") as etcd:
            transport = connect(etcd.address)
            stores.append((await transport.list("/")).store)
            await transport.close()
            again = EmbeddedEtcd(locate(None), tmp_path / "data", SystemClock())
            assert again.supervisor.program.command == etcd.supervisor.program.command
        shutil.rmtree(tmp_path / "data")
    assert stores[0] != stores[1]
    assert "" not in stores
