"""What one process answers to the golden question, alone with all of the model.

Takes an engine's flags about the model (--model-dir, --kv-bits, ...), serves on a port of its own for as long as the question
takes, and prints the answer as JSON (schemas.formation.GoldenAnswer) on stdout. Exit codes are the engine's.
"""

import asyncio
import http.client
import json
import socket
import sys
from collections.abc import Sequence
from contextlib import closing

import uvloop

from engine.flags import parse
from engine.gauges import EngineState
from engine.process import EXIT_PORT, finish, new_service, serve, write_exit_reason
from engine.service import EXIT_CRASH, EXIT_OK, Service
from machinery import process_log as fleet_logging
from machinery.http_server import listen
from models import golden_question
from schemas.formation import GoldenAnswer

_HOST, _NAME = "127.0.0.1", "golden"
# The question and its answer have some 40 tokens.
_CONTEXT = 256
_LOOK_S = 0.1
# For one answer, on a machine that may be busy with much else.
_ANSWER_S = 120.0


def run(arguments: Sequence[str]) -> int:
    """Ask, and print the answer; return the exit code."""
    try:
        listener = listen(_HOST, 0)
    except OSError as error:
        write_exit_reason(f"no port can be had on {_HOST}: {error.strerror}")
        return EXIT_PORT
    port = int(listener.getsockname()[1])
    named = [
        word
        for flag in ("replica", "replica-uid", "node", "served-name")
        for word in (f"--{flag}", _NAME)
    ]
    sized = ["--context-length", str(_CONTEXT), "--concurrency", "1", "--prefix-cache-bytes", "0"]
    config = parse([*named, *sized, *arguments, "--host", _HOST, "--port", str(port)])
    fleet_logging.setup("golden")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code, said = runner.run(_ask(new_service(config), listener))
    if code != EXIT_OK or not isinstance(said, GoldenAnswer):
        return finish(code, str(said))
    sys.stdout.write(f"{said.model_dump_json(by_alias=True)}\n")
    sys.stdout.flush()
    return finish(code, "")


async def _ask(service: Service, listener: socket.socket) -> tuple[int, GoldenAnswer | str]:
    """Serve for as long as the answer takes; return the exit code, and the answer or what went wrong."""
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(serve(service, listener))
        while service.state is EngineState.LOADING:
            await service.clock.sleep(_LOOK_S)
        answer: GoldenAnswer | str = service.message
        if service.state is EngineState.READY:
            answer = await asyncio.to_thread(_answer, service.config.port)
        service.request_stop()
        code, message = await serving
    if code != EXIT_OK:
        return code, message
    return (EXIT_OK if isinstance(answer, GoldenAnswer) else EXIT_CRASH), answer


def _answer(port: int) -> GoldenAnswer | str:
    """Ask the engine's own API, as agents ask a group; return the answer, or why there is none."""
    with closing(http.client.HTTPConnection(_HOST, port, timeout=_ANSWER_S)) as connection:
        try:
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
