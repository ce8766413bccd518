"""`fleetctl chat`: flags, and which of the two ways it goes."""

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
from fleetctl.cli.connect import gateway_options, run
from fleetctl.fleets import gateways
from fleetctl.verbs.wait import parse_duration

_HELP = """Talk with a model, through a gateway.

\b
  fleetctl chat qwen
  fleetctl chat qwen -m "Why is the sky blue?"
  git diff | fleetctl chat qwen --system "Review this change."

At a terminal it is a conversation: /help says what else it understands, Ctrl-C stops an answer, Ctrl-D ends it. With -m, or with
input that is no terminal, it asks once, and prints the answer and nothing else.
"""
_HISTORY = Path(platformdirs.user_state_dir("mlx-fleet")) / "chat_history"


@click.command(help=_HELP)
@click.argument("model")
@click.option("-m", "--message", help="Ask this, print the answer, and end.")
@click.option("--system", default="", help="The system prompt.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="The engine's own is 1.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="The longest answer.")
@click.option("--stats", is_flag=True, help="Say after each answer what it took (on stderr).")
@click.option(
    "--timeout", default="5m", show_default=True, help="How long the gateway may say nothing."
)
@click.option(
    "--history",
    type=click.Path(dir_okay=False, path_type=Path),
    default=_HISTORY,
    show_default="chat_history in the user's state folder",
    envvar="FLEET_CHAT_HISTORY",
    help="File that keeps what you typed, for the arrow keys.",
)
@click.option("--no-history", is_flag=True, help="Keep nothing of what is typed.")
@gateway_options
def chat(model: str, message: str | None, timeout: str, **options: Any) -> None:
    """Talk with a model, through a gateway."""
    silence_s = parse_duration(timeout)
    question = message
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.buffer.read().decode(errors="replace")
    if question is not None and not question.strip():
        raise click.UsageError("there is nothing to ask: the message is empty")
    key = gateways.read_api_key(options)
    door = GatewayAccess(url=run(gateways.find_url(options)), key=key, silence_s=silence_s)
    wishes = ChatSettings(
        model=model,
        system=options["system"],
        temperature=options["temperature"],
        max_tokens=options["max_tokens"],
    )
    talk = Conversation(wishes=wishes, session=secrets.token_hex(16))
    if question is not None:
        session.ask_once(door, talk, question, with_stats=options["stats"])
        return
    history = None if options["no_history"] else options["history"]
    with LinePrompt(history) as prompt:
        ChatSession(door, talk, prompt, with_stats=options["stats"]).run()
