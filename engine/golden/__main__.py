"""`python -m engine.golden`: prints the answer of one process, with the whole model, to the golden question.

Takes an engine's configuration, of which it keeps the model and its settings, serves on a socket of its own while it
asks, and prints the answer as JSON (schemas.formation.GoldenAnswer) on stdout. Exit codes are the engine's.
"""

import asyncio
import http.client
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from engine import config as engine_config
from engine.lifecycle import EngineState
from engine.process import (
    EngineListener,
    finish,
    new_service,
    open_listener,
    raise_file_limit,
    serve,
    write_exit_reason,
)
from engine.service import Service
from machinery import process_log as fleet_logging
from machinery.process_secrets import disable_core_dumps
from models import golden_question
from schemas.formation import GoldenAnswer
from schemas.kv_cache import KvCache
from schemas.wire.engine_address import EngineAddress
from schemas.wire.engine_config import EngineConfig
from schemas.wire.exit_codes import ExitCode

_NAME = "golden"
_POLL_S = 0.1
# The time for one answer, on a machine that may be busy.
_ANSWER_S = 120.0


def run(arguments: Sequence[str]) -> int:
    """Ask the question and print the answer; return the exit code."""
    disable_core_dumps()
    config = engine_config.read(arguments)
    complaint = raise_file_limit()
    if complaint:
        write_exit_reason(complaint)
        return ExitCode.UNUSABLE
    with TemporaryDirectory(prefix="mlx-fleet-") as folder:
        try:
            address = EngineAddress.at_socket(Path(folder) / "golden.sock")
            listener = open_listener(address)
        except (OSError, ValueError) as error:
            write_exit_reason(f"cannot listen on a socket in {folder}: {error}")
            return ExitCode.ADDRESS_IN_USE
        code, answer = _run_at(address, listener, config)
    if code != ExitCode.OK or not isinstance(answer, GoldenAnswer):
        return finish(code, str(answer))
    sys.stdout.write(f"{answer.model_dump_json(by_alias=True)}\n")
    sys.stdout.flush()
    return finish(code, "")


def _run_at(
    address: EngineAddress, listener: EngineListener, config: EngineConfig
) -> tuple[int, GoldenAnswer | str]:
    cache = config.kv_cache
    config = EngineConfig(
        model_dir=config.model_dir,
        replica=_NAME,
        served_names=(_NAME,),
        url=address.url,
        context_length=config.context_length,
        kv_cache=KvCache(bits=cache.bits, window=cache.window, keep=cache.keep, prefix_bytes="0"),
        adapter=config.adapter,
    )
    fleet_logging.setup("golden")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_ask(new_service(config), listener))


async def _ask(service: Service, listener: EngineListener) -> tuple[int, GoldenAnswer | str]:
    """Serve until the question is answered; return the exit code, and the answer or the error."""
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(serve(service, listener))
        while service.state is EngineState.LOADING:
            await service.clock.sleep(_POLL_S)
        answer: GoldenAnswer | str = service.message
        if service.state is EngineState.READY:
            answer = await asyncio.to_thread(_answer, service.config.address)
        service.request_stop()
        code, message = await serving
    if code != ExitCode.OK:
        return code, message
    return (ExitCode.OK if isinstance(answer, GoldenAnswer) else ExitCode.CRASHED), answer


def _answer(address: EngineAddress) -> GoldenAnswer | str:
    """Ask the engine's own API, as agents ask a group; return the answer or the error."""
    with closing(http.client.HTTPConnection(address.authority)) as connection:
        try:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(_ANSWER_S)
            connection.sock.connect(address.socket)
            headers = {"content-type": "application/json"}
            connection.request(
                "POST",
                golden_question.PATH,
                json.dumps(golden_question.request_body(_NAME)),
                headers,
            )
            raw = connection.getresponse().read()
            return golden_question.read_answer(json.loads(raw), is_reference=True)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"the golden question was not answered: {error}"


if __name__ == "__main__":
    # A model is a folder; otherwise transformers would look some of them up on the hub.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    sys.exit(run(sys.argv[1:]))
