"""Handover of the listening socket from a running gateway to its successor, without refusing a connection.

Both processes talk over a unix socket that only their user may open. Each message is a line of
JSON; one carries the listening socket. See docs/adr/0021-gateway-request-path.md.

    new                                 old
    {"versions": [1]}               ->
                                    <-  {"version": 1, "host", "port", "tls"} and the listening socket
    ... reads the fleet state; both accept connections ...
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

from machinery.clock import Clock
from machinery.http_server import ListenAddress, listen

log = logging.getLogger(__name__)

_VERSION = 1
_LINE_LIMIT = 4096
# A process that does not answer within this time is considered hung.
_TIMEOUT_S = 5.0
_POLL_S = 0.1
_BACKLOG = 16


class HandOverError(Exception):
    """The listening socket is not available; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ListenerClaim:
    """A listening socket and the channel to the gateway that also holds it."""

    listener: socket.socket
    predecessor: socket.socket | None = None
    """Channel to the running gateway, which waits for our message; None if no gateway runs."""

    def close(self) -> None:
        """Give up the claim; a running gateway goes on."""
        self.listener.close()
        if self.predecessor is not None:
            self.predecessor.close()


async def claim_listener(
    path: Path | None, where: ListenAddress, clock: Clock, *, is_tls: bool = False
) -> ListenerClaim:
    """Return the listening socket of the gateway behind `path`, or a new one.

    `is_tls`: this gateway serves HTTPS. For a moment both gateways accept connections, so both must serve the same.

    Raises:
        HandOverError: the gateway behind `path` does not hand over.
        OSError: no gateway is there, and the address cannot be listened on.

    """
    deadline_s = clock.monotonic() + _TIMEOUT_S
    while True:
        timeout: HandOverError | None = None
        if path is not None:
            try:
                listener_claim = _request_listener(path, where, is_tls=is_tls)
            except TimeoutError:
                timeout = HandOverError(
                    f"the gateway behind {path} does not answer within {_TIMEOUT_S:g} s but still "
                    "listens; end it with kill -9 and start again"
                )
            else:
                if listener_claim is not None:
                    return listener_claim
        try:
            return ListenerClaim(listen(*where))
        except OSError as error:
            if timeout is not None:
                raise timeout from error
            # The process that has the address may be about to offer it: another starting gateway,
            # or one that ends.
            is_over = path is None or clock.monotonic() >= deadline_s
            if is_over or error.errno != errno.EADDRINUSE:
                raise
        await clock.sleep(_POLL_S)


def _request_listener(path: Path, where: ListenAddress, *, is_tls: bool) -> ListenerClaim | None:
    """Ask the gateway behind the path; return None if there is none. Raises HandOverError, TimeoutError."""
    try:
        result = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISSOCK(result.st_mode):
        raise HandOverError(f"{path} is not a socket; give --handover a path of its own")
    if result.st_uid != os.geteuid():
        raise HandOverError(
            f"{path} belongs to another user (uid {result.st_uid}); give --handover a path of its own"
        )
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        channel.settimeout(_TIMEOUT_S)
        try:
            channel.connect(str(path))
            channel.sendall(_line({"versions": [_VERSION]}))
            data, fds, _, _ = socket.recv_fds(channel, _LINE_LIMIT, 1)
        except (ConnectionError, FileNotFoundError):
            return None  # the gateway is gone, only its file is left
        sockets = [stack.enter_context(socket.socket(fileno=fd)) for fd in fds]
        answer = _parsed(data)
        if "refused" in answer:
            raise HandOverError(f"the gateway behind {path} says: {answer['refused']}")
        if not sockets or answer.get("version") != _VERSION:
            return None  # the gateway ended during the exchange
        theirs = ListenAddress(str(answer.get("host")), int(answer.get("port", 0)))
        if where.host != theirs.host or where.port not in (0, theirs.port):
            raise HandOverError(
                f"the gateway behind {path} listens on {theirs.host}:{theirs.port}, not on "
                f"{where.host}:{where.port}; stop it first, or give --handover another path"
            )
        # Releases without TLS omit the field.
        if bool(answer.get("tls")) != is_tls:
            schemes = ("HTTPS", "plain HTTP") if is_tls else ("plain HTTP", "HTTPS")
            raise HandOverError(
                f"the gateway behind {path} serves {schemes[1]}, and this one would serve {schemes[0]} on the same "
                "port; stop it first"
            )
        sockets[0].set_inheritable(False)
        channel.settimeout(0)
        stack.pop_all()
        return ListenerClaim(sockets[0], channel)


class HandOver:
    """One gateway's side of the handover, from its start until it passes its socket on."""

    def __init__(
        self,
        path: Path,
        claimed: ListenerClaim,
        where: ListenAddress,
        clock: Clock,
        *,
        is_tls: bool = False,
    ) -> None:
        self._path = path
        self._is_tls = is_tls
        self._claimed = claimed
        self._where = where
        self._clock = clock
        self._predecessor = claimed.predecessor
        self._inode = 0

    async def wait_ready(self, is_ready: Callable[[], bool]) -> None:
        """Wait while another gateway serves, until this one is ready."""
        while self._predecessor is not None and not is_ready():
            if not _is_alive(self._predecessor):
                self._predecessor.close()
                self._predecessor = await self._new_predecessor()
            await self._clock.sleep(_POLL_S)

    async def run(self, on_taken: Callable[[], None]) -> None:
        """Take over from the predecessor, then wait for the successor and call `on_taken`."""
        while self._predecessor is not None and not await self._take_over(self._predecessor):
            self._predecessor = await self._new_predecessor()
        try:
            # Listen on the path, replacing the previous listener. Raises OSError.
            own = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            own.unlink(missing_ok=True)
            offer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            offer.settimeout(0)
            mask = os.umask(0o177)  # no other user may open it from the first moment on
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
        except OSError as error:
            log.exception(
                "cannot offer the socket to a successor",
                extra={"path": str(self._path)},
                exc_info=error,
            )
            return
        is_taken = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(self._serve(offer, is_taken))
                await is_taken.wait()
                serving.cancel()
            log.info("handed over; finishing running requests")
            on_taken()
        finally:
            offer.close()
            if not is_taken.is_set():
                self._remove()

    async def _new_predecessor(self) -> socket.socket | None:
        """Return the channel to the gateway that took over predecessor us; None if the predecessor just ended.

        A gateway that was quicker than this one needs a moment until it can be found.
        """
        deadline_s = self._clock.monotonic() + _TIMEOUT_S
        while self._clock.monotonic() < deadline_s:
            with contextlib.suppress(HandOverError, TimeoutError):
                thread = await asyncio.to_thread(
                    _request_listener, self._path, self._where, is_tls=self._is_tls
                )
                if thread is not None:
                    thread.listener.close()  # the same socket as ours
                    return thread.predecessor
            await self._clock.sleep(_POLL_S)
        return None

    async def _take_over(self, predecessor: socket.socket) -> bool:
        """Return whether the predecessor gave way or no longer answers."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await loop.sock_sendall(predecessor, _line({"take": True}))
                answer = _parsed(await loop.sock_recv(predecessor, _LINE_LIMIT))
        except TimeoutError:
            log.warning("predecessor does not answer; continuing without it")
            return True
        except ConnectionError:
            return False
        finally:
            predecessor.close()
        return answer.get("taken") is True

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()

    async def _serve(self, offer: socket.socket, is_taken: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                successor, _ = await loop.sock_accept(offer)
                group.create_task(self._serve_successor(successor, is_taken))

    async def _serve_successor(self, successor: socket.socket, is_taken: asyncio.Event) -> None:
        """Pass the socket to a successor; when it confirms, it serves the fleet's requests."""
        loop = asyncio.get_running_loop()
        with successor, contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                greeting = _parsed(await loop.sock_recv(successor, _LINE_LIMIT))
            if _VERSION not in greeting.get("versions", []):
                refused = "our versions have no way to hand over in common; stop this one first"
                await loop.sock_sendall(successor, _line({"refused": refused}))
                return
            response = {
                "version": _VERSION,
                "host": self._where.host,
                "port": self._where.port,
                "tls": self._is_tls,
            }
            socket.send_fds(successor, [_line(response)], [self._claimed.listener.fileno()])
            # The successor takes its time to read the fleet state. If it dies, this call ends too.
            if _parsed(await loop.sock_recv(successor, _LINE_LIMIT)).get("take") is True:
                await loop.sock_sendall(successor, _line({"taken": True}))
                is_taken.set()


def _is_alive(predecessor: socket.socket) -> bool:
    try:
        # The predecessor sends nothing predecessor we do; an empty read means that it ended.
        return predecessor.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def _line(message: dict[str, Any]) -> bytes:
    return orjson.dumps(message) + b"\n"


def _parsed(data: bytes) -> dict[str, Any]:
    """Return the message; empty if the data is not a message."""
    with contextlib.suppress(orjson.JSONDecodeError):
        parsed = orjson.loads(data)
        if isinstance(parsed, dict):
            return parsed
    return {}
