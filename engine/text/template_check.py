"""Checks a chat template in a child process: whether it renders one short message within limits.

A template comes with a model's files and is a program: it may loop forever, or double a string until the machine has no
memory. The child ends then; a thread of the engine could not be ended. The child imports neither mlx nor transformers.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, BinaryIO, Final, assert_never

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser
from typing_extensions import override

from machinery import limited_child
from machinery.limited_child import ChildEnd, ChildLimits

# A usual template takes 10 ms and some megabytes; a busy machine may start the child late.
_LIMITS: Final = ChildLimits(memory_bytes=1 << 30, cpu_s=2, wall_s=60.0)
_MAX_OUTPUT_CHARACTERS = 1 << 20

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
_TOO_SLOW = f"it takes more than {_LIMITS.cpu_s} s for one short message"
_TOO_LARGE = f"it takes more than {_LIMITS.memory_bytes >> 20} MiB of memory for one short message"
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
    question = json.dumps({"templates": list(templates), "variables": dict(variables)})
    outcome = limited_child.run("engine.text.template_check", question.encode(), _LIMITS)
    match outcome.end:
        case ChildEnd.DONE:
            return outcome.output.decode()
        case ChildEnd.TIME:
            return _TOO_SLOW
        case ChildEnd.MEMORY | ChildEnd.FAILED:
            return _TOO_LARGE
        case _:
            assert_never(outcome.end)


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


def _answer(question: bytes, output: BinaryIO) -> None:
    """Write the first complaint about the templates of the question."""
    asked = json.loads(question)
    complaints = (render_complaint(one, asked["variables"]) for one in asked["templates"])
    output.write(next(filter(None, complaints), "")[:300].encode())


def main() -> None:
    """Answer the question on stdin."""
    limited_child.serve(_answer, _LIMITS)


if __name__ == "__main__":
    main()
