"""`fleetctl create hubtoken`: stores a token for a model hub. It is read from a file or standard input, never from flags."""

import re
import sys
from pathlib import Path
from typing import Any, Final

import click
from pydantic import SecretStr, TypeAdapter, ValidationError

from fleetctl.cli.arguments import reason_option
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from machinery import process_secrets
from machinery.clock import SystemClock
from models.hub.model_hub import DEFAULT_ENDPOINT
from schemas.meta import ObjectName
from schemas.records import HubToken
from store import codec, keys
from store.errors import ConflictError
from store.port import Delete, ModRevisionGuard, Put

_NAME: Final = TypeAdapter(ObjectName)
_MAX_BYTES: Final = 500
_HELP = """Store a token for a model hub, for gated and private repositories.

\b
  fleetctl create hubtoken huggingface --token-file ~/.cache/huggingface/token
  pass show huggingface | fleetctl create hubtoken huggingface --token-file -

The token is sent to its endpoint only. The leading reconciler reads it, and a Mac gets it while it fetches.
A token of the same name is replaced. `fleetctl create hubtoken NAME --remove` deletes it.
"""


@click.command(help=_HELP)
@click.argument("name")
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="File with the token, readable by you alone; - for standard input.",
)
@click.option(
    "--endpoint",
    default=DEFAULT_ENDPOINT,
    show_default=True,
    help="The hub or mirror that the token is for.",
)
@click.option("--remove", is_flag=True, help="Delete the token instead.")
@reason_option
@store_options
def hubtoken(
    name: str, token_file: str | None, endpoint: str, remove: bool, **options: Any
) -> None:
    """Store a token for a model hub, for gated and private repositories."""
    try:
        _NAME.validate_python(name)
    except ValidationError as error:
        raise click.UsageError(f"NAME: {name!r}: {error.errors()[0]['msg']}") from error
    if remove:
        run(_remove(name, options))
        click.echo(f"hubtoken/{name} deleted")
        return
    if token_file is None:
        raise click.UsageError("give --token-file FILE, or --token-file - for standard input")
    try:
        made = HubToken(
            name=name,
            endpoint=endpoint,
            token=SecretStr(read_token(token_file)),
            created=SystemClock().now(),
        )
    except ValidationError as error:
        # The message of the token's own field could quote it; the endpoint is the only other one.
        raise click.UsageError(
            f"--endpoint: {endpoint[:200]!r} is no address; expected one like {DEFAULT_ENDPOINT}"
        ) from error
    run(_write(made, options))
    click.echo(f"hubtoken/{name} stored for {endpoint}")


def read_token(file: str) -> str:
    """Return the token in a file or on standard input.

    Raises:
        FleetctlError: the file cannot be read, others may read it, or it has no token.

    """
    where = "standard input" if file == "-" else file
    try:
        raw = (
            sys.stdin.buffer.read(_MAX_BYTES + 1)
            if file == "-"
            else process_secrets.read_secret_file(Path(file).expanduser())
        )
    except process_secrets.OpenSecretError as error:
        raise FleetctlError(str(error)) from error
    except OSError as error:
        raise FleetctlError(f"{where} cannot be read: {error.strerror or error}") from error
    text = raw.decode(errors="replace").strip()
    if not re.fullmatch(r"[!-~]{1,500}", text):
        raise FleetctlError(
            f"{where} holds no token: expected one word of at most {_MAX_BYTES} characters, such as hf_..."
        )
    return text


async def _write(made: HubToken, options: dict[str, Any]) -> None:
    key = keys.named(keys.HUB_TOKEN_PREFIX, made.name)
    async with open_store(options) as transport:
        before = await transport.get(key)
        guard = ModRevisionGuard(key=key, mod_revision=before.mod_revision if before else 0)
        try:
            await transport.commit([guard], [Put(key=key, value=codec.encode(made))])
        except ConflictError as error:
            raise FleetctlError(
                f"hubtoken/{made.name} was changed by another client; run the command again"
            ) from error


async def _remove(name: str, options: dict[str, Any]) -> None:
    key = keys.named(keys.HUB_TOKEN_PREFIX, name)
    async with open_store(options) as transport:
        if await transport.get(key) is None:
            raise FleetctlError(f"there is no hubtoken {name}")
        await transport.commit([], [Delete(key=key)])
