"""How a new gateway gets the listening socket of the one that runs, so that no connection is refused in between.

Both talk over a unix socket that only their user may open: a line of JSON each time, the listening
socket along with one of them. See docs/adr/0025-hand-over.md.

    new                                 old
    {"versions": [1]}               ->
                                    <-  {"version": 1, "host", "port"} and the listening socket
    ... learns the fleet; both take connections as they come ...
    {"take": true}                  ->
                                    <-  {"taken": true}; drains, ends
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway.routing.table import Origin
from machinery.clock import Clock
from machinery.http_server import listen

log = logging.getLogger(__name__)

_VERSION = 1
_LINE_LIMIT = 4096
# What the other process does not answer within this, it never will.
_PATIENCE_S = 5.0
_AGAIN_S = 0.1
_BACKLOG = 16


class HandOverError(Exception):
    """The socket cannot be had; says why and what to do."""


@dataclass(frozen=True, slots=True)
class ListenerClaim:
    """A listening socket, and the way to who has it as well."""

    listener: socket.socket
    before: socket.socket | None = None
    """To the gateway that ran before, which waits for our word; None if there is none."""


async def claim_listener(path: Path | None, where: Origin, clock: Clock) -> ListenerClaim:
    """Return the listening socket of the gateway behind `path`, else a new one.

    Raises:
        HandOverError: who is there does not give it away.
        OSError: nobody is there, and it cannot be listened on the address.

    """
    deadline_s = clock.monotonic() + _PATIENCE_S
    while True:
        hung: HandOverError | None = None
        if path is not None:
            try:
                found = _asked(path, where)
            except TimeoutError:
                hung = HandOverError(
                    f"the gateway behind {path} does not answer within {_PATIENCE_S:g} s and still "
                    "listens; end it with kill -9 and start again"
                )
            else:
                if found is not None:
                    return found
        try:
            return ListenerClaim(listen(*where))
        except OSError as error:
            if hung is not None:
                raise hung from error
            # Who has the address may be about to offer it: two that start at once, one that ends.
            is_over = path is None or clock.monotonic() >= deadline_s
            if is_over or error.errno != errno.EADDRINUSE:
                raise
        await clock.sleep(_AGAIN_S)


def _asked(path: Path, where: Origin) -> ListenerClaim | None:
    """Ask who is behind the path; return None if nobody is. Raises HandOverError, TimeoutError."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISSOCK(found.st_mode):
        raise HandOverError(f"{path} is no socket; give --handover a path of its own")
    if found.st_uid != os.geteuid():
        raise HandOverError(
            f"{path} belongs to another user (uid {found.st_uid}); give --handover a path of its own"
        )
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        channel.settimeout(_PATIENCE_S)
        try:
            channel.connect(str(path))
            channel.sendall(_line({"versions": [_VERSION]}))
            data, fds, _, _ = socket.recv_fds(channel, _LINE_LIMIT, 1)
        except (ConnectionError, FileNotFoundError):
            return None  # it is gone, only its file is left
        given = [stack.enter_context(socket.socket(fileno=fd)) for fd in fds]
        answer = _parsed(data)
        if "refused" in answer:
            raise HandOverError(f"the gateway behind {path} says: {answer['refused']}")
        if not given or answer.get("version") != _VERSION:
            return None  # it ended in the middle
        theirs = Origin(str(answer.get("host")), int(answer.get("port", 0)))
        if where.host != theirs.host or where.port not in (0, theirs.port):
            raise HandOverError(
                f"the gateway behind {path} listens on {theirs.host}:{theirs.port}, not on "
                f"{where.host}:{where.port}; stop it first, or give --handover another path"
            )
        given[0].set_inheritable(False)
        channel.settimeout(0)
        stack.pop_all()
        return ListenerClaim(given[0], channel)


class HandOver:
    """A gateway's part in it, from its start to when it gives its socket to the next."""

    def __init__(self, path: Path, claimed: ListenerClaim, where: Origin, clock: Clock) -> None:
        self._path = path
        self._claimed = claimed
        self._where = where
        self._clock = clock
        self._before = claimed.before
        self._inode = 0

    async def until(self, is_ready: Callable[[], bool]) -> None:
        """Wait for as long as another gateway serves, until we are ready."""
        while self._before is not None and not is_ready():
            if not _lives(self._before):
                self._before.close()
                self._before = await self._next()
            await self._clock.sleep(_AGAIN_S)

    async def run(self, on_taken: Callable[[], None]) -> None:
        """Tell who was before us to go, then wait for who comes after us, and call `on_taken`."""
        while self._before is not None and not await self._took_over(self._before):
            self._before = await self._next()
        try:
            offer = self._offered()
        except OSError as error:
            log.exception("cannot hand over later", extra={"path": str(self._path)}, exc_info=error)
            return
        taken = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(self._serve(offer, taken))
                await taken.wait()
                serving.cancel()
            log.info("handed over; finishing what runs")
            on_taken()
        finally:
            offer.close()
            if not taken.is_set():
                self._remove()

    async def _next(self) -> socket.socket | None:
        """Return the way to who took over from who was before us; None if it has just ended.

        Whoever was quicker than we were needs a moment until it can be found.
        """
        deadline_s = self._clock.monotonic() + _PATIENCE_S
        while self._clock.monotonic() < deadline_s:
            with contextlib.suppress(HandOverError, TimeoutError):
                found = await asyncio.to_thread(_asked, self._path, self._where)
                if found is not None:
                    found.listener.close()  # the same as ours
                    return found.before
            await self._clock.sleep(_AGAIN_S)
        return None

    async def _took_over(self, before: socket.socket) -> bool:
        """Return whether who was before us gives way, or is past answering."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await loop.sock_sendall(before, _line({"take": True}))
                answer = _parsed(await loop.sock_recv(before, _LINE_LIMIT))
        except TimeoutError:
            log.warning("the gateway before us does not answer; going on without")
            return True
        except ConnectionError:
            return False
        finally:
            before.close()
        return answer.get("taken") is True

    def _offered(self) -> socket.socket:
        """Listen on the path, in place of whoever did. Raises OSError."""
        own = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        own.unlink(missing_ok=True)
        offer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        offer.settimeout(0)
        mask = os.umask(0o177)  # from its first moment on nobody else may open it
        try:
            offer.bind(str(own))
        except OSError:
            offer.close()
            raise
        finally:
            os.umask(mask)
        offer.listen(_BACKLOG)
        self._inode = own.lstat().st_ino
        own.rename(self._path)
        return offer

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()

    async def _serve(self, offer: socket.socket, taken: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                newcomer, _ = await loop.sock_accept(offer)
                group.create_task(self._meet(newcomer, taken))

    async def _meet(self, newcomer: socket.socket, taken: asyncio.Event) -> None:
        """Give a newcomer the socket; once it says so, the fleet's requests are its business."""
        loop = asyncio.get_running_loop()
        with newcomer, contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                hello = _parsed(await loop.sock_recv(newcomer, _LINE_LIMIT))
            if _VERSION not in hello.get("versions", []):
                refused = "our versions have no way to hand over in common; stop this one first"
                await loop.sock_sendall(newcomer, _line({"refused": refused}))
                return
            said = {"version": _VERSION, "host": self._where.host, "port": self._where.port}
            socket.send_fds(newcomer, [_line(said)], [self._claimed.listener.fileno()])
            # It takes its time to learn the fleet; if it dies, this ends, too.
            if _parsed(await loop.sock_recv(newcomer, _LINE_LIMIT)).get("take") is True:
                await loop.sock_sendall(newcomer, _line({"taken": True}))
                taken.set()


def _lives(before: socket.socket) -> bool:
    try:
        # It says nothing before we do; an empty answer is its end.
        return before.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def _line(said: dict[str, Any]) -> bytes:
    return orjson.dumps(said) + b"\n"


def _parsed(data: bytes) -> dict[str, Any]:
    """Return what was said; nothing if it is no message of ours."""
    with contextlib.suppress(orjson.JSONDecodeError):
        found = orjson.loads(data)
        if isinstance(found, dict):
            return found
    return {}
