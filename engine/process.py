"""The engine's process: socket, signals, exit codes.

Exit codes: 0 asked to stop, 1 crashed, 2 the model directory or a flag is unusable (starting again
will not help), 3 the port is taken, 4 another rank of the group is gone, and this one with it.
"""

import asyncio
import contextlib
import gc
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Sequence

import uvicorn
import uvloop

from engine.api.app import make_app
from engine.config import EngineConfig
from engine.flags import parse
from engine.service import EXIT_GROUP, EXIT_OK, Service
from machinery import process_log as fleet_logging
from machinery.clock import SystemClock
from machinery.http_server import BoundedHttpProtocol, SignalServer, listen

EXIT_PORT = 3
# For responses whose last byte is on its way when the drain is over.
_CLOSE_TIMEOUT_S = 5
_LOST_TIMEOUT_S = 1
_STDERR_FD = 2
# Longer than a gateway keeps an idle connection: the side that sends next should be the one to close.
_KEEP_ALIVE_S = 75


def run(arguments: Sequence[str] | None, *, secret: str) -> int:
    """Run one engine; return its exit code. `secret` is what the ranks of a group know each other by."""
    config = parse(arguments, secret=secret)
    fleet_logging.setup("engine")
    # The agent that started this process may end, and adopt it later: its terminal and its process
    # group are nothing to us.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        listener = listen(config.host, config.port)
    except OSError as error:
        write_exit_reason(
            f"port {config.port} is in use on {config.host} or cannot be had: {error.strerror}"
        )
        return EXIT_PORT
    # Until the model is loaded nothing that is made is garbage, and looking for some is a fifth of the start.
    gc.disable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code, message = runner.run(serve(new_service(config), listener))
    return finish(code, message)


def finish(code: int, message: str) -> int:
    """Say why the process ends, if not because it was asked to; return the code, or end at once with it."""
    if code != EXIT_OK:
        write_exit_reason(message)
    if threading.active_count() > 1:
        # Stuck in the driver, or in the middle of a huge prompt: Python would wait for the latter,
        # and MLX's own clean-up would run under the former.
        os._exit(code)
    return code


def new_service(config: EngineConfig) -> Service:
    """Return a service that has not begun."""
    # Seeds and ids must differ between two processes that start in the same moment.
    return Service(config, clock=SystemClock(), entropy=secrets.SystemRandom())


async def serve(service: Service, listener: socket.socket) -> tuple[int, str]:
    """Serve until told to stop; return the exit code and the last word."""
    server = SignalServer(
        uvicorn.Config(
            make_app(service),
            http=BoundedHttpProtocol,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        ),
        service.request_stop,
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        code = await service.run()
        if code == EXIT_GROUP:
            # The others have ended already; who reads slowly gets no more than this.
            server.config.timeout_graceful_shutdown = _LOST_TIMEOUT_S
        server.should_exit = True
    return code, service.message


def write_exit_reason(message: str) -> None:
    """Leave the reason of an end as the last line of stderr, where the agent looks for it."""
    line = f"engine: {' '.join(message.split())}\n".encode()
    with contextlib.suppress(OSError):  # the agent that read it may be gone
        sys.stderr.flush()
        # MLX's own threads complain of a lost rank there whenever they like.
        ours = os.dup(_STDERR_FD)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDERR_FD)
        os.write(ours, line)
