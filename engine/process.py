"""Process of the engine: socket, signals and exit codes (schemas/wire/exit_codes.py)."""

import asyncio
import contextlib
import gc
import importlib
import os
import resource
import secrets
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
import uvloop

from engine.api.app import make_app, read_gauges
from engine.api.connections import EngineConnectionLimits, EngineHttpProtocol
from engine.api.link import LinkMiddleware
from engine.api.tls import EngineTls, read_credentials
from engine.request_log import SpanRecorder
from engine.service import Service
from identity.credentials import Credentials, CredentialsError
from machinery import environment, unix_sockets
from machinery import process_log as fleet_logging
from machinery.clock import SystemClock
from machinery.http_server import HttpServer, listen
from machinery.process_log import LogLevel
from models import generation_config
from schemas.wire.connections import SERVER_KEEP_ALIVE_S
from schemas.wire.engine_address import EngineAddress
from schemas.wire.engine_config import EngineConfig
from schemas.wire.exit_codes import ExitCode

# For responses whose last bytes are on their way at the end of the drain.
_CLOSE_TIMEOUT_S = 5
# The same, after another rank of the group was lost.
_LOST_TIMEOUT_S = 1
_STDERR_FD = 2
# The event loop waits this long for the interpreter, at each of its steps, while another thread computes in Python.
# With Python's 5 ms, a chat waited 230 ms beside bodies of 170 kB, and 90 ms with this.
_SWITCH_S = 0.0005
# mlx-lm's own limits (mlx_lm/utils.py of 0.32.2). Connections may take half of the files.
_FILES, _MIN_HARD_FILES = 2048, 4096


def run(
    config: EngineConfig,
    *,
    log_level: LogLevel = "info",
) -> int:
    """Run one engine; return its exit code."""
    fleet_logging.setup("engine", log_level)
    sys.setswitchinterval(_SWITCH_S)
    # The engine outlives the agent that started it, so the hang-up of the agent's terminal does not concern it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    complaint = raise_file_limit()
    if complaint:
        write_exit_reason(complaint)
        return ExitCode.UNUSABLE
    try:
        spans = _span_recorder(config)
    except ValueError as error:
        write_exit_reason(str(error))
        return ExitCode.UNUSABLE
    try:
        credentials = read_credentials(config.identity_dir, config.node, SystemClock())
    except CredentialsError as error:
        write_exit_reason(f"identityDir: {error}")
        return ExitCode.UNUSABLE
    try:
        listener = open_listener(config.address)
    except (OSError, unix_sockets.SocketFolderError) as error:
        write_exit_reason(_listen_error(config.address, error))
        return ExitCode.ADDRESS_IN_USE
    sampling = generation_config.fill_in(config.sampling, config.model_dir)
    config = config.model_copy(update={"sampling": sampling})
    # Loading a model creates no garbage, and collecting takes a fifth of the start. The service turns it on again.
    gc.disable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code, message = runner.run(serve(new_service(config, spans), listener, credentials))
    if spans is not None:
        spans.close()
    return finish(code, message)


def _span_recorder(config: EngineConfig) -> SpanRecorder | None:
    """Return the recorder of spans, or None if tracing is not configured. Children do not inherit what it was told.

    Raises:
        ValueError: the environment asks for an exporter or a protocol that is not supported.

    """
    is_follower = config.group is not None and config.group.rank > 0
    if is_follower or not environment.are_traces_enabled():
        return None
    # Importing OpenTelemetry takes 90 ms and 4 MB, so only engines that trace pay for it.
    module = importlib.import_module("engine.traces")
    spans: SpanRecorder = module.RequestSpans(node=config.node, replica=config.replica)
    environment.drop_secrets(environment.TRACE_PREFIX)
    return spans


@dataclass(frozen=True, slots=True)
class EngineListener:
    """The socket on which an engine listens, and its file if it has one."""

    socket: socket.socket
    file: unix_sockets.SocketFile | None = None


def open_listener(address: EngineAddress) -> EngineListener:
    """Listen at the address.

    Raises:
        OSError: it is in use, or not of this machine.
        SocketFolderError: other users may enter the folder of the socket.

    """
    if address.socket:
        return EngineListener(*unix_sockets.listen(Path(address.socket)))
    return EngineListener(listen(address.host, address.port))


def _listen_error(address: EngineAddress, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    if address.socket:
        return f"socket {address.socket} is in use or not available: {reason}"
    return f"port {address.port} is in use on {address.host} or not available: {reason}"


def finish(code: int, message: str) -> int:
    """Write the reason of a failure to stderr; return the exit code, or exit at once if threads are stuck."""
    if code != ExitCode.OK:
        write_exit_reason(message)
    if threading.active_count() > 1:
        # A thread is stuck in the driver or tokenizes a huge prompt. Python would wait for it, and MLX would be
        # cleaned up while the driver uses it.
        os._exit(code)
    return code


def new_service(config: EngineConfig, spans: SpanRecorder | None = None) -> Service:
    """Return a service that is not started."""
    # Seeds and ids must differ between processes that start at the same time.
    entropy = secrets.SystemRandom()
    return Service(config, clock=SystemClock(), entropy=entropy, spans=spans)


async def serve(
    service: Service, listener: EngineListener, credentials: Credentials | None = None
) -> tuple[int, str]:
    """Serve until the service ends, TLS with credentials; return the exit code and the reason."""
    limits = EngineConnectionLimits(
        is_crowded=lambda: service.admission.is_crowded, gauges=lambda: read_gauges(service)
    )
    app = make_app(service)
    config = uvicorn.Config(
        LinkMiddleware(app, limits, app.names),
        http=cast(
            "type[EngineHttpProtocol]",
            partial(EngineHttpProtocol, limits, limits.limiter()),
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # malformed requests of strangers are not worth a line
        access_log=False,
        server_header=False,
        timeout_keep_alive=SERVER_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
    tls = None if credentials is None else EngineTls(credentials, service.metrics.tls)
    acceptor = None if tls is None else tls.options().acceptor
    server = HttpServer(config, service.request_stop, acceptor)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener.socket]))
        following = None
        if tls is not None:
            follow = tls.run(service.clock, lambda: server.server_state.connections)
            following = group.create_task(follow)
        code = await service.run()
        if code == ExitCode.GROUP_LOST:
            # The other ranks have ended already: slow readers get no more time than this.
            server.config.timeout_graceful_shutdown = _LOST_TIMEOUT_S
        if listener.file is not None:
            listener.file.remove()
        server.should_exit = True
        if following is not None:
            following.cancel()
    return code, service.message


def raise_file_limit() -> str:
    """Allow this process the open files that it needs; return the reason why it cannot have them, "" if it can.

    mlx-lm sets both limits when it is imported, and fails if the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _MIN_HARD_FILES:
        return (
            f"this process may have {hard} open files, and mlx-lm needs a hard limit of {_MIN_HARD_FILES}: run "
            f"`ulimit -n {_MIN_HARD_FILES}` before the agent starts, or set HardResourceLimits of its launchd job"
        )
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, hard))
    return ""


def write_exit_reason(message: str) -> None:
    """Write the reason as the last line of stderr, where the agent reads it."""
    line = f"engine: {' '.join(message.split())}\n".encode()
    with contextlib.suppress(OSError):  # the agent that reads it may be gone
        sys.stderr.flush()
        # MLX's threads also write about a lost rank to stderr: silence them.
        ours = os.dup(_STDERR_FD)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDERR_FD)
        os.write(ours, line)
