"""Checks a chat template in a child process: whether it renders one short message within limits.

A template comes with a model's files and is a program: it may loop forever, or double a string until the machine has no
memory. The child ends then; a thread of the engine could not be ended. The child imports neither mlx nor transformers.
"""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from tempfile import TemporaryFile
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import psutil
from jinja2 import nodes
from jinja2.parser import Parser
from typing_extensions import override

from machinery.process_secrets import disable_core_dumps

# A usual template takes 10 ms and some megabytes; a busy machine may start the child late.
_CPU_S, _WALL_S = 2, 60.0
_MEMORY_BYTES = 1 << 30
_MAX_OUTPUT_CHARACTERS = 1 << 20
_POLL_S = 0.02

MESSAGES = [{"role": "user", "content": "?"}]
REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    IndexError,
)
"""Errors of a template for messages that it does not support."""
_TOO_SLOW = f"it takes more than {_CPU_S} s for one short message"
_TOO_LARGE = f"it takes more than {_MEMORY_BYTES >> 20} MiB of memory for one short message"
_TOO_LONG = f"it writes more than {_MAX_OUTPUT_CHARACTERS >> 20} MiB for one short message"
_FAULTS = (
    (jinja2.TemplateSyntaxError, "it cannot be parsed: {error}"),
    (OverflowError, "it loops too often: {error}"),
    (RecursionError, "it calls itself without an end"),
    (MemoryError, _TOO_LARGE),
)


def find_complaint(templates: Sequence[str], variables: Mapping[str, Any]) -> str:
    """Return why one of the templates cannot be used, "" if all can; waits for a child process.

    `variables` are those of every rendering, such as the special tokens.
    """
    with TemporaryFile() as question, TemporaryFile() as answer:
        question.write(
            json.dumps({"templates": list(templates), "variables": dict(variables)}).encode()
        )
        question.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-m", "engine.text.template_check"],
            stdin=question,
            stdout=answer,
            stderr=subprocess.DEVNULL,
        )
        try:
            complaint = _wait(child)
        finally:
            child.kill()
            child.wait()
        answer.seek(0)
        return complaint or answer.read().decode()


def _wait(child: "subprocess.Popen[bytes]") -> str:
    """Wait until the child ends; return the limit that it reached, "" if it answered."""
    for _ in range(int(_WALL_S / _POLL_S)):
        try:
            code = child.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            # macOS ignores the child's own limit of memory.
            if _resident_bytes(child.pid) > _MEMORY_BYTES:
                return _TOO_LARGE
            continue
        if code == -signal.SIGXCPU:
            return _TOO_SLOW
        return _TOO_LARGE if code else ""
    return _TOO_SLOW


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


class _Generation(jinja2.ext.Extension):
    """The tag around answers, which transformers adds for training."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    @override
    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """Return an environment like that of transformers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime(2026, 1, 1, tzinfo=UTC).strftime
    return environment


def render_complaint(template: str, variables: Mapping[str, Any]) -> str:
    """Return why the template cannot be used; "" if it renders, or refuses the message."""
    given = {"messages": MESSAGES, "add_generation_prompt": True, "tools": None, **variables}
    try:
        pieces = _environment().from_string(template).generate(**given)
        size = 0
        while size <= _MAX_OUTPUT_CHARACTERS and (piece := next(pieces, None)) is not None:
            size += len(piece)
    except (jinja2.TemplateSyntaxError, OverflowError, RecursionError, MemoryError) as error:
        fault = next(text for kind, text in _FAULTS if isinstance(error, kind))
        return fault.format(error=error)
    except REFUSALS:
        return ""
    return _TOO_LONG if size > _MAX_OUTPUT_CHARACTERS else ""


def main() -> None:
    """Answer the question on stdin; print the complaint."""
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S + 1))
    disable_core_dumps()
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    question = json.load(sys.stdin)
    complaints = (
        render_complaint(template, question["variables"]) for template in question["templates"]
    )
    sys.stdout.write(next(filter(None, complaints), "")[:300])


if __name__ == "__main__":
    main()
