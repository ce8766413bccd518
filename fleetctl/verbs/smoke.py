"""The verb `fleetctl test`: one short request to each model, through a gateway."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import click

from fleetctl.chat import answer_stream
from fleetctl.chat.answer_stream import AnswerStream, GatewayAccess
from fleetctl.chat.conversation import ChatAnswer
from fleetctl.chat.gateway_pool import GatewayPool
from fleetctl.cli.arguments import output_option, timeout_option
from fleetctl.cli.connect import gateway_options, run
from fleetctl.cli.documents import print_tree
from fleetctl.cli.errors import FleetctlError
from fleetctl.output import printers
from fleetctl.verbs.chat import open_gateways
from machinery.clock import SystemClock

_HELP = """Ask each model one short question through a gateway, and show which answered.

\b
  fleetctl test
  fleetctl test qwen
  fleetctl test qwen -o json

The request takes the way of every client's: a gateway, its routing, an engine. Without MODEL, all models that the API key may
use are asked, one after another. The exit code is 0 if all answered, else 1. A model that is scaled to zero is started.
"""
_QUESTION = "Reply with one word: ready."
_TITLES = ("MODEL", "RESULT", "NODE", "REPLICA", "FIRST TOKEN", "TOTAL", "TOKENS", "MESSAGE")
_LONGEST_MESSAGE = 200
# An engine's refusal of chats with a model that generates no text ends with what to use; the fields besides the model.
_INSTEAD: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "Use /v1/embeddings.": ("/v1/embeddings", {"input": _QUESTION}),
    "Use /v1/rerank or /v1/score.": ("/v1/score", {"text_1": _QUESTION, "text_2": _QUESTION}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """The result of one model."""

    model: str
    answer: ChatAnswer
    error: str = ""
    """Empty if the model answered."""

    def tree(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        answer = self.answer
        return {
            "model": self.model,
            "ok": not self.error,
            "node": answer.node,
            "replica": answer.replica,
            "firstTokenSeconds": answer.first_s,
            "totalSeconds": answer.total_s,
            "outputTokens": answer.output_tokens,
            "error": self.error,
        }

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        answer = self.answer
        return (
            self.model,
            "failed" if self.error else "ok",
            answer.node or "-",
            answer.replica or "-",
            "-" if answer.first_s is None else f"{answer.first_s:.2f}s",
            "-" if self.error else f"{answer.total_s:.2f}s",
            "-" if answer.output_tokens is None else str(answer.output_tokens),
            self.error[:_LONGEST_MESSAGE] or "-",
        )


@click.command(name="test", help=_HELP, short_help="Ask each model one question, and report.")
@click.argument("model", required=False)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Maximum length of an answer, in tokens.",
)
@timeout_option("5m", "Longest time without data from the gateway.")
@output_option("table", "json")
@gateway_options
def smoke(model: str | None, max_tokens: int, output: str, **options: Any) -> None:
    """Ask each model one short question through a gateway, and show which answered."""
    pool = open_gateways(options)
    models = (model,) if model is not None else run(pool.send(answer_stream.list_models))
    if not models:
        raise FleetctlError(
            "the fleet serves no model yet; `fleetctl get md` shows what is deployed"
        )
    checks = [run(_check(pool, name, max_tokens)) for name in models]
    if output == "json":
        tree = {"models": [check.tree() for check in checks]}
        print_tree(tree, "json")
    else:
        click.echo(printers.align_columns([check.cells() for check in checks], _TITLES))
    failed = sum(bool(check.error) for check in checks)
    if failed:
        click.echo(f"error: {failed} of {len(checks)} models did not answer", err=True)
        sys.exit(1)


async def _check(pool: GatewayPool, model: str, max_tokens: int) -> ModelCheck:
    """Return the result of one request to a model: a chat, or what it answers where it generates no text."""
    stream = AnswerStream(SystemClock())
    body = {
        "model": model,
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    async def ask(access: GatewayAccess) -> None:
        await stream.read(access, body, lambda _: None)

    try:
        await pool.send(ask, can_resend=lambda: stream.answer.first_s is None)
    except FleetctlError as error:
        for advice, (path, fields) in _INSTEAD.items():
            if advice in error.format_message():
                return await _check_once(pool, path, {"model": model, **fields})
        return ModelCheck(model=model, answer=stream.answer, error=error.format_message())
    if not stream.answer.output_tokens:
        return ModelCheck(model=model, answer=stream.answer, error="the answer has no tokens")
    return ModelCheck(model=model, answer=stream.answer)


async def _check_once(pool: GatewayPool, path: str, body: Mapping[str, str]) -> ModelCheck:
    model, clock = body["model"], SystemClock()
    began_s = clock.monotonic()

    async def ask(access: GatewayAccess) -> ChatAnswer:
        return await answer_stream.ask_once(access, path, body)

    try:
        answer = await pool.send(ask)
    except FleetctlError as error:
        return ModelCheck(model=model, answer=ChatAnswer(), error=error.format_message())
    return ModelCheck(model=model, answer=replace(answer, total_s=clock.monotonic() - began_s))
