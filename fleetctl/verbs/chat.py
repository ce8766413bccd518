"""The verbs `fleetctl chat` and `run`: an interactive conversation, or a single question in a pipe."""

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import platformdirs

from fleetctl.chat import answer_stream, session
from fleetctl.chat.answer_stream import GatewayAccess
from fleetctl.chat.conversation import ChatSettings, Conversation
from fleetctl.chat.gateway_pool import GatewayPool
from fleetctl.chat.session import ChatSession, LinePrompt
from fleetctl.cli.arguments import parse_duration, timeout_option
from fleetctl.cli.connect import gateway_options, run
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.hub_options import source_option
from fleetctl.fleets import gateways
from fleetctl.verbs import run_hub_model
from identity.dialer import Dial
from machinery.clock import SystemClock
from schemas.meta import object_name

_HELP = """Chat with a model through a gateway.

\b
  fleetctl chat
  fleetctl chat qwen
  fleetctl chat qwen -m "Why is the sky blue?"
  git diff | fleetctl chat qwen --system "Review this change."

Without MODEL, this is the only model of the fleet; at a terminal, you choose among several.
At a terminal, this starts a conversation: /help lists its commands, Ctrl-C stops an answer, Ctrl-D ends it. With -m, or if
standard input is not a terminal, it asks one question and prints only the answer.
"""
_RUN_HELP = """Chat with a model, as `ollama run` does.

\b
  fleetctl run mlx-community/Qwen3-8B-4bit
  fleetctl run Qwen/Qwen3-8B-MLX-4bit --source modelscope
  fleetctl run qwen
  fleetctl run qwen "Why is the sky blue?"
  git diff | fleetctl run qwen

A repository of a model hub that is not deployed yet is deployed first; the Macs fetch it. Then this is the same as
`fleetctl chat MODEL [-m PROMPT]`.
"""
_LISTED_S, _POLL_S = 15.0, 0.2
_HISTORY = Path(platformdirs.user_state_dir("mlx-fleet")) / "chat_history"

# The last is shown first.
_OPTIONS: tuple[Callable[..., Any], ...] = (
    gateway_options,
    click.option("--no-history", is_flag=True, help="Do not save the input history."),
    click.option(
        "--history",
        type=click.Path(dir_okay=False, path_type=Path),
        default=_HISTORY,
        show_default="chat_history in the user's state folder",
        envvar="FLEET_CHAT_HISTORY",
        help="File for the input history.",
    ),
    timeout_option("5m", "Longest time without data from the gateway."),
    click.option("--stats", is_flag=True, help="Print statistics of each answer on stderr."),
    click.option(
        "--max-tokens", type=click.IntRange(min=1), help="Maximum length of an answer, in tokens."
    ),
    click.option(
        "--temperature",
        type=click.FloatRange(0, 2),
        help="Sampling temperature (default: that of the deployment or of the model).",
    ),
    click.option("--system", default="", help="System prompt."),
)


def _chat_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in _OPTIONS:
        command = option(command)
    return command


@click.command(help=_HELP)
@click.argument("model", required=False)
@click.option("-m", "--message", help="Ask this question, print the answer and exit.")
@_chat_options
def chat(model: str | None, message: str | None, **options: Any) -> None:
    """Chat with a model through a gateway."""
    question = _read_question(message)
    pool = open_gateways(options)
    if model is None:
        models = run(pool.send(answer_stream.list_models))
        model = choose_model(models, can_ask=question is None)
    _converse(pool, model, question, options)


@click.command(help=_RUN_HELP, short_help="Chat with a model; one of a hub is deployed first.")
@click.argument("model")
@click.argument("prompt", nargs=-1)
@source_option
@_chat_options
def run_model(model: str, prompt: tuple[str, ...], **options: Any) -> None:
    """Chat with a model, as `ollama run` does."""
    question = _read_question(" ".join(prompt) if prompt else None)
    pool = open_gateways(options)
    known = run(pool.send(answer_stream.list_models))
    if model not in known and not run_hub_model.is_hub_id(model):
        raise FleetctlError(_unknown_model_text(model, known))
    if run_hub_model.is_hub_id(model):
        run(run_hub_model.deploy_and_wait(model, options))
        run(_wait_until_listed(pool, model))
    _converse(pool, model, question, options)


def _unknown_model_text(model: str, known: Sequence[str]) -> str:
    """Return the error for a model that no deployment has and that is no repository of a hub."""
    repo, at, revision = model.partition("@")
    if at and run_hub_model.is_hub_id(repo):
        return (
            f"a model's name has no revision: {repo}. To serve {revision or 'another branch'}: "
            f"fleetctl create modeldeployment NAME --hub {repo} --revision {revision or 'BRANCH'}; then: fleetctl run NAME"
        )
    unknown = answer_stream.unknown_model_text(model, known)
    end = "" if unknown.endswith("?") else "."
    return (
        f"{unknown}{end} To fetch and deploy one of a hub, write its whole name: fleetctl run ORGANISATION/NAME. "
        f"To deploy a folder on the Macs: fleetctl create modeldeployment {object_name(model, 'NAME')} --model FOLDER"
    )


async def _wait_until_listed(pool: GatewayPool, model: str) -> None:
    """Wait until the gateway has heard of a new model; at most some seconds, as its own answer says more."""
    clock = SystemClock()
    deadline = clock.monotonic() + _LISTED_S
    while clock.monotonic() < deadline:
        if model in await pool.send(answer_stream.list_models):
            return
        await clock.sleep(_POLL_S)


def _read_question(message: str | None) -> str | None:
    """Return the only question, from the command line or a pipe; None for a conversation."""
    given = None if message is None else os.fsencode(message)  # as typed: it may not be UTF-8
    if given is None and not sys.stdin.isatty():
        given = sys.stdin.buffer.read()
    question = None if given is None else given.decode(errors="replace")
    if question is not None and not question.strip():
        raise click.UsageError("there is nothing to ask: the message is empty")
    return question


def open_gateways(options: dict[str, Any]) -> GatewayPool:
    """Return the gateways that flags name, or those of the fleet; `options`: of `gateway_options`, and `timeout`."""
    silence_s = parse_duration(options["timeout"])
    key = gateways.read_api_key(options)

    def accesses(found: Sequence[tuple[str, Dial]]) -> list[GatewayAccess]:
        return [
            GatewayAccess(url=url, key=key, dial=dial, silence_s=silence_s) for url, dial in found
        ]

    async def find_others() -> list[GatewayAccess]:
        return accesses(await gateways.find_others(options))

    first = accesses(run(gateways.find(options)))
    is_local = bool(gateways.local_url(options))
    return GatewayPool(first, SystemClock(), find_others=find_others if is_local else None)


def choose_model(models: Sequence[str], *, can_ask: bool) -> str:
    """Return the only model, or the one that the user chooses.

    Raises:
        FleetctlError: there is none, or there are several and the user cannot be asked.

    """
    if not models:
        raise FleetctlError(
            "the fleet serves no model yet; `fleetctl get md` shows what is deployed"
        )
    if len(models) == 1:
        return models[0]
    if not can_ask:
        raise FleetctlError(f"which model? Name one of: {', '.join(models)}")
    for number, name in enumerate(models, start=1):
        click.echo(f"{number:>3}  {name}")

    def parse(answer: str) -> str:
        word = answer.strip()
        if word.isdecimal() and 1 <= int(word) <= len(models):
            return models[int(word) - 1]
        if word not in models:
            raise click.UsageError(f"write a number from 1 to {len(models)}, or a name")
        return word

    return str(click.prompt("model", value_proc=parse))


def _converse(pool: GatewayPool, model: str, question: str | None, options: dict[str, Any]) -> None:
    """Ask one question, or hold a conversation."""
    settings = ChatSettings(
        model=model,
        system=options["system"],
        temperature=options["temperature"],
        max_tokens=options["max_tokens"],
    )
    conversation = Conversation(settings=settings, session=secrets.token_hex(16))
    if question is not None:
        session.ask_once(pool, conversation, question, with_stats=options["stats"])
        return
    history = None if options["no_history"] else options["history"]
    with LinePrompt(history) as prompt:
        ChatSession(pool, conversation, prompt, with_stats=options["stats"]).run()
