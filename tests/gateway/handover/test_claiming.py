"""What a newcomer does with whoever it finds behind the path; and what is done with strange newcomers."""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from gateway import handover
from gateway.handover import HandOver, HandOverError, ListenerClaim, claim_listener
from gateway.routing.table import Origin
from machinery.clock import SystemClock
from machinery.http_server import listen
from tests.support.waiting import until

CLOCK = SystemClock()
HERE = "127.0.0.1"


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@asynccontextmanager
async def owner(path: Path) -> AsyncIterator[tuple[Origin, asyncio.Event]]:
    """A gateway that would give its socket away."""
    taken = asyncio.Event()
    with listen(HERE, 0) as listener:
        where = Origin(HERE, port_of(listener))
        giver = HandOver(path, ListenerClaim(listener), where, CLOCK)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(giver.run(taken.set))
            await until(lambda: path.exists())
            yield where, taken
            task.cancel()


async def claimed(path: Path, where: Origin) -> ListenerClaim:
    """Claim from another thread, as another process would."""
    return await asyncio.to_thread(asyncio.run, claim_listener(path, where, CLOCK))


async def test_nobody_is_there(path: Path) -> None:
    found = await claim_listener(path, Origin(HERE, 0), CLOCK)
    with found.listener:
        assert found.before is None


@pytest.mark.parametrize("port", [None, 0])
async def test_the_same_socket_is_handed_over(path: Path, port: int | None) -> None:
    async with owner(path) as (where, taken):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        found = await claimed(path, Origin(HERE, where.port if port is None else port))
        with found.listener:
            assert port_of(found.listener) == where.port
            assert not found.listener.get_inheritable()
            heir = HandOver(path, found, where, CLOCK)
            inode = path.stat().st_ino
            async with asyncio.TaskGroup() as group:
                task = group.create_task(heir.run(taken.set))
                await taken.wait()
                await until(lambda: path.stat().st_ino != inode)
                task.cancel()
            assert not path.exists()


async def test_another_address(path: Path) -> None:
    async with owner(path) as (where, taken):
        for asked in (Origin(HERE, where.port - 1), Origin("127.0.0.2", where.port)):
            with pytest.raises(HandOverError, match=f"listens on 127.0.0.1:{where.port}, not on"):
                await claimed(path, asked)
        assert not taken.is_set()


async def test_a_file_that_is_no_socket(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(HandOverError, match="is no socket"):
        await claim_listener(path, Origin(HERE, 0), CLOCK)
    assert path.read_text() == "mine"


async def test_a_socket_of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(path))
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)  # only root could give the file away
        with pytest.raises(HandOverError, match=rf"belongs to another user \(uid {owner}\)"):
            await claim_listener(path, Origin(HERE, 0), CLOCK)


async def test_a_socket_that_nobody_listens_on(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    found = await claim_listener(path, Origin(HERE, 0), CLOCK)
    with found.listener:
        assert found.before is None


@asynccontextmanager
async def saying(path: Path, answer: bytes) -> AsyncIterator[None]:
    """Somebody who answers each newcomer so, and says no more."""

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(answered, path):
        yield


@pytest.mark.parametrize("answer", [b"", b"hello\n", b"[]\n", b'{"version": 1}\n'])
async def test_who_ends_in_the_middle_or_talks_nonsense(path: Path, answer: bytes) -> None:
    async with saying(path, answer):
        found = await claimed(path, Origin(HERE, 0))
        with found.listener:
            assert found.before is None


async def test_who_refuses(path: Path) -> None:
    async with saying(path, b'{"refused": "not you"}\n'):
        with pytest.raises(HandOverError, match="says: not you"):
            await claimed(path, Origin(HERE, 0))


async def test_who_hangs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_PATIENCE_S", 0.1)
    with socket.socket(socket.AF_UNIX) as hung, listen(HERE, 0) as listener:
        hung.bind(str(path))
        hung.listen()
        with pytest.raises(HandOverError, match=r"does not answer within 0\.1 s"):
            await claim_listener(path, Origin(HERE, port_of(listener)), CLOCK)
        found = await claim_listener(path, Origin(HERE, 0), CLOCK)  # there is another way
        found.listener.close()


async def test_who_hangs_after_it_gave_the_socket(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_PATIENCE_S", 0.1)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    ours.setblocking(False)
    with theirs, listen(HERE, 0) as listener:
        where = Origin(HERE, port_of(listener))
        heir = HandOver(path, ListenerClaim(listener, ours), where, CLOCK)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(heir.run(lambda: None))
            await until(lambda: path.exists())
            task.cancel()
        assert orjson.loads(theirs.recv(100)) == {"take": True}


async def test_who_ends_after_it_gave_the_socket(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_PATIENCE_S", 0.2)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    ours.setblocking(False)
    theirs.close()
    with listen(HERE, 0) as listener:
        heir = HandOver(path, ListenerClaim(listener, ours), Origin(HERE, 1), CLOCK)
        await heir.until(lambda: False)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(heir.run(lambda: None))
            await until(lambda: path.exists())
            task.cancel()


@pytest.mark.parametrize("said", [b'{"versions": [2, 3]}\n', b"{}\n", b"GET / HTTP/1.1\r\n\r\n"])
async def test_newcomers_of_another_version(path: Path, said: bytes) -> None:
    async with owner(path) as (_, taken):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(said)
        assert "versions" in orjson.loads(await reader.readline())["refused"]
        writer.close()
        assert not taken.is_set()
