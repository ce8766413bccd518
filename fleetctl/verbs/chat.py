"""The verb `fleetctl chat`: an interactive conversation, or a single question in a pipe."""

import secrets
import sys
from pathlib import Path
from typing import Any

import click
import platformdirs

from fleetctl.chat import session
from fleetctl.chat.answer_stream import GatewayAccess
from fleetctl.chat.conversation import ChatSettings, Conversation
from fleetctl.chat.session import ChatSession, LinePrompt
from fleetctl.cli.arguments import parse_duration
from fleetctl.cli.connect import gateway_options, run
from fleetctl.fleets import gateways

_HELP = """Chat with a model through a gateway.

\b
  fleetctl chat qwen
  fleetctl chat qwen -m "Why is the sky blue?"
  git diff | fleetctl chat qwen --system "Review this change."

At a terminal, this starts a conversation: /help lists its commands, Ctrl-C stops an answer, Ctrl-D ends it. With -m, or if
standard input is not a terminal, it asks one question and prints only the answer.
"""
_HISTORY = Path(platformdirs.user_state_dir("mlx-fleet")) / "chat_history"


@click.command(help=_HELP)
@click.argument("model")
@click.option("-m", "--message", help="Ask this question, print the answer and exit.")
@click.option("--system", default="", help="System prompt.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    help="Sampling temperature (the engine's default is 1).",
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), help="Maximum length of an answer, in tokens."
)
@click.option("--stats", is_flag=True, help="Print statistics of each answer on stderr.")
@click.option(
    "--timeout", default="5m", show_default=True, help="Longest time without data from the gateway."
)
@click.option(
    "--history",
    type=click.Path(dir_okay=False, path_type=Path),
    default=_HISTORY,
    show_default="chat_history in the user's state folder",
    envvar="FLEET_CHAT_HISTORY",
    help="File for the input history.",
)
@click.option("--no-history", is_flag=True, help="Do not save the input history.")
@gateway_options
def chat(model: str, message: str | None, timeout: str, **options: Any) -> None:
    """Chat with a model through a gateway."""
    silence_s = parse_duration(timeout)
    question = message
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.buffer.read().decode(errors="replace")
    if question is not None and not question.strip():
        raise click.UsageError("there is nothing to ask: the message is empty")
    key = gateways.read_api_key(options)
    access = GatewayAccess(url=run(gateways.find_url(options)), key=key, silence_s=silence_s)
    settings = ChatSettings(
        model=model,
        system=options["system"],
        temperature=options["temperature"],
        max_tokens=options["max_tokens"],
    )
    conversation = Conversation(settings=settings, session=secrets.token_hex(16))
    if question is not None:
        session.ask_once(access, conversation, question, with_stats=options["stats"])
        return
    history = None if options["no_history"] else options["history"]
    with LinePrompt(history) as prompt:
        ChatSession(access, conversation, prompt, with_stats=options["stats"]).run()
