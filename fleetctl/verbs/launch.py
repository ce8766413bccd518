"""The verbs `fleetctl launch` and `proxy`: programs of others that use the fleet's models."""

import asyncio
import getpass
import os
import re
import secrets
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import platformdirs

from fleetctl.chat import answer_stream
from fleetctl.chat.answer_stream import (
    GatewayAccess,
    GatewayUnreachableError,
    KeyRefusedError,
    ListedModel,
)
from fleetctl.chat.gateway_pool import GatewayPool
from fleetctl.cli.arguments import parse_duration, timeout_option
from fleetctl.cli.connect import gateway_options, open_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import api_keys, gateways
from fleetctl.launch import local_proxy
from fleetctl.launch.agents import AGENTS, MIN_CONTEXT, CodingAgent, Setup
from fleetctl.launch.prefix_recorder import PrefixRecorder
from fleetctl.verbs.chat import choose_model
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock, SystemClock
from machinery.environment import child_environment, no_proxy_for
from schemas.records import ApiKey
from store.errors import StoreError

_FOLDER = Path(platformdirs.user_data_dir("mlx-fleet")) / "agents"
# A key that a killed launch leaves behind ends by itself.
_KEY_TTL = timedelta(days=7)
# A gateway learns of a new key within moments.
_NEW_KEY_S = 15.0
_KEY_BACKOFF = Backoff(first_s=0.05, limit_s=1.0)
_OLLAMA_PORT, _LM_STUDIO_PORT = 11434, 1234

_LAUNCH_HELP = f"""Start a coding agent on a model of the fleet.

\b
  fleetctl launch claude
  fleetctl launch codex --model qwen-coder
  fleetctl launch opencode -- run "explain this repository"

AGENT is one of: {", ".join(AGENTS)}. Its settings and sessions are in a folder of their own, so that yours do not change. It gets an
API key of its own, which is deleted when it ends; without the right to create one, give yours with --api-key-file. Requests pass through
fleetctl, which verifies the gateway and uses another one if it dies.
"""
_PROXY_HELP = """Serve the fleet at localhost:11434 (Ollama) and localhost:1234 (LM Studio).

\b
  fleetctl proxy
  fleetctl proxy --port 8080

Programs that know only those addresses, and have no key, use the fleet's models as if they ran here. Every user and program of
this machine can use them: requests get the key of --api-key-file. Ctrl-C ends it.
"""
_timeout_option = timeout_option("10m", "Longest time without data from the gateway.")


@click.command(help=_LAUNCH_HELP, short_help="Start a coding agent on a model of the fleet.")
@click.argument("agent", type=click.Choice(tuple(AGENTS)), metavar="AGENT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--model", help="Name of the model (default: you choose, the longest context first).")
@click.option(
    "--record",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the agent's system prompt and tools to this file, for spec.prefixes of a model.",
)
@_timeout_option
@gateway_options
async def launch(
    agent: str,
    arguments: tuple[str, ...],
    model: str | None,
    record: Path | None,
    **options: Any,
) -> None:
    """Start a coding agent on a model of the fleet."""
    chosen = AGENTS[agent]
    program = shutil.which(chosen.program)
    if program is None:
        raise FleetctlError(
            f"{chosen.title} is not installed: there is no {chosen.program} in PATH. Install it: {chosen.install}"
        )
    recorder, clock = None if record is None else PrefixRecorder(record), SystemClock()
    async with _own_key(chosen, options) as accesses:
        listed = await GatewayPool(accesses, clock).send(answer_stream.list_models_with_context)
        served = _choose(listed, model)
        if served.context is not None and served.context < MIN_CONTEXT:
            click.echo(
                f"warning: {served.id} has a context of {served.context:,} tokens, and {chosen.title} needs some "
                f"{MIN_CONTEXT:,}: declare contextLength: {MIN_CONTEXT} if the model and the Macs have room for it",
                err=True,
            )
        token = secrets.token_urlsafe(24)
        on_request = None if recorder is None else recorder.take
        async with local_proxy.serving(
            accesses, (0,), clock, token=token, on_request=on_request
        ) as (url,):
            folder = _FOLDER / chosen.program
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            setup = Setup(
                folder=folder, url=url, key=token, model=served.id, context=served.context
            )
            command = chosen.write(setup)
            added = {**no_proxy_for(local_proxy.HOST), **command.environment}
            code = await _run_child((program, *arguments, *command.arguments), added)
    if recorder is not None:
        click.echo(recorder.summary(agent), err=True)
    if code:
        raise click.exceptions.Exit(code)


async def _run_child(words: Sequence[str], added: dict[str, str]) -> int:
    """Run a program at our terminal until it ends; return its exit code as a shell does."""
    loop = asyncio.get_running_loop()
    child = await asyncio.create_subprocess_exec(
        *words, env=child_environment(added, without=("ANTHROPIC_", "OPENAI_", "CODEX_"))
    )
    # Ctrl-C is the program's, which is in the foreground with us.
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    loop.add_signal_handler(signal.SIGTERM, child.terminate)
    try:
        code = await child.wait()
    except asyncio.CancelledError:
        child.terminate()
        await child.wait()
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
    return code if code >= 0 else 128 - code


def _choose(listed: Sequence[ListedModel], name: str | None) -> ListedModel:
    """Return the model of this name, the only one, or the one that the user chooses. Raises FleetctlError."""
    by_context = sorted(listed, key=lambda model: (-(model.context or 0), model.id))
    names = [model.id for model in by_context]
    if name is None:
        can_ask = os.isatty(0)
        name = choose_model(names, can_ask=can_ask)
    if name not in names:
        raise FleetctlError(answer_stream.unknown_model_text(name, names))
    return by_context[names.index(name)]


@asynccontextmanager
async def _own_key(
    agent: CodingAgent, options: dict[str, Any]
) -> AsyncIterator[list[GatewayAccess]]:
    """Yield the gateways with the key for them: the user's, or a new one that is deleted at the end."""
    accesses = await _accesses(options)
    if accesses[0].key:
        yield accesses
        return
    clock = SystemClock()
    secret = api_keys.new_secret()
    user = re.sub(r"[^a-z0-9-]+", "-", getpass.getuser().lower()).strip("-") or "user"
    key = ApiKey(
        name=f"{agent.program}-{user}-{secrets.token_hex(3)}",
        hash=secret.hash,
        created=clock.now(),
        expires=clock.now() + _KEY_TTL,
    )
    try:
        async with open_store(options) as transport:
            is_needed = not await api_keys.unrequired_note(transport)
            if is_needed:
                await api_keys.create(transport, key)
    except (FleetctlError, StoreError):
        # A gateway without keys needs none; one with keys refuses the next request and says how to give one.
        is_needed = False
    if not is_needed:
        yield accesses
        return
    try:
        accesses = [replace(access, key=secret.text) for access in accesses]
        for access in accesses:
            await _wait_for_key(access, clock)
        yield accesses
    finally:
        try:
            async with open_store(options) as transport:
                await api_keys.revoke(transport, key.name)
        except (FleetctlError, StoreError) as error:
            click.echo(
                f"warning: apikey/{key.name} was not deleted ({error}); it expires in {_KEY_TTL.days} days. "
                f"Delete it: fleetctl delete apikey {key.name}",
                err=True,
            )


async def _wait_for_key(access: GatewayAccess, clock: Clock) -> None:
    """Wait until a gateway has read a new key from the store. Raises KeyRefusedError after 15 s."""
    retries, deadline_s = Retries(_KEY_BACKOFF, clock), clock.monotonic() + _NEW_KEY_S
    while True:
        try:
            await answer_stream.list_models(access)
        except KeyRefusedError:
            if clock.monotonic() >= deadline_s:
                raise
        except GatewayUnreachableError:
            return  # another one may answer
        else:
            return
        await retries.wait()


async def _accesses(options: dict[str, Any]) -> list[GatewayAccess]:
    """Return the gateways that flags name, or those of the fleet."""
    key, silence_s = gateways.read_api_key(options), parse_duration(options["timeout"])
    dials = await gateways.find(options)
    if gateways.local_url(options):
        dials += await gateways.find_others(options)
    return [GatewayAccess(url=url, key=key, dial=dial, silence_s=silence_s) for url, dial in dials]


@click.command(
    help=_PROXY_HELP, short_help="Serve the fleet at the addresses of Ollama and LM Studio."
)
@click.option(
    "--port",
    "ports",
    multiple=True,
    type=click.IntRange(1, 65_535),
    default=(_OLLAMA_PORT, _LM_STUDIO_PORT),
    show_default=True,
    help="Port on loopback; can be repeated.",
)
@_timeout_option
@gateway_options
async def proxy(ports: tuple[int, ...], **options: Any) -> None:
    """Serve the fleet at the addresses of Ollama and LM Studio."""
    clock = SystemClock()
    accesses = await _accesses(options)
    # A wrong key or address is an error now and not in every program.
    names = await GatewayPool(accesses, clock).send(answer_stream.list_models)
    async with local_proxy.serving(accesses, ports, clock) as urls:
        click.echo(f"{', '.join(urls)}: {', '.join(names) or 'no model yet'}")
        await asyncio.Event().wait()
