"""`fleetctl create externalkey`: stores the API key of an external server, from a file or standard input."""

from typing import Any, Final

import click
from pydantic import SecretStr, TypeAdapter, ValidationError

from fleetctl.cli.arguments import reason_option
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.verbs.create_hubtoken import read_token
from machinery.clock import SystemClock
from schemas.external import parse_url
from schemas.meta import ObjectName
from schemas.records import ExternalKey
from store import codec, keys
from store.errors import ConflictError
from store.port import Delete, ModRevisionGuard, Put

_NAME: Final = TypeAdapter(ObjectName)
_HELP = """Store the API key of an external server, for spec.external of a ModelRoute.

\b
  fleetctl create externalkey openai --url https://api.openai.com --token-file ~/openai.key
  pass show openai | fleetctl create externalkey openai --url https://api.openai.com --token-file -

Gateways send the key to the host and port of --url only. A key of the same name is replaced.
`fleetctl create externalkey NAME --remove` deletes it.
"""


@click.command(help=_HELP)
@click.argument("name")
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="File with the key, readable by you alone; - for standard input.",
)
@click.option("--url", help="The server that the key is for; its path does not count.")
@click.option("--remove", is_flag=True, help="Delete the key instead.")
@reason_option
@store_options
def externalkey(
    name: str, token_file: str | None, url: str | None, remove: bool, **options: Any
) -> None:
    """Store the API key of an external server."""
    try:
        _NAME.validate_python(name)
    except ValidationError as error:
        raise click.UsageError(f"NAME: {name!r}: {error.errors()[0]['msg']}") from error
    if remove:
        run(_remove(name, options))
        click.echo(f"externalkey/{name} deleted")
        return
    if token_file is None:
        raise click.UsageError("give --token-file FILE, or --token-file - for standard input")
    if url is None:
        raise click.UsageError("give --url: the server that the key is for")
    try:
        origin = parse_url(url).origin
    except ValueError as error:
        raise click.UsageError(f"--url: {error}") from error
    made = ExternalKey(
        name=name, url=url, key=SecretStr(read_token(token_file)), created=SystemClock().now()
    )
    run(_write(made, options))
    click.echo(f"externalkey/{name} stored for {origin}")


async def _write(made: ExternalKey, options: dict[str, Any]) -> None:
    key = keys.named(keys.EXTERNAL_KEY_PREFIX, made.name)
    async with open_store(options) as transport:
        before = await transport.get(key)
        guard = ModRevisionGuard(key=key, mod_revision=before.mod_revision if before else 0)
        try:
            await transport.commit([guard], [Put(key=key, value=codec.encode(made))])
        except ConflictError as error:
            raise FleetctlError(
                f"externalkey/{made.name} was changed by another client; run the command again"
            ) from error


async def _remove(name: str, options: dict[str, Any]) -> None:
    key = keys.named(keys.EXTERNAL_KEY_PREFIX, name)
    async with open_store(options) as transport:
        if await transport.get(key) is None:
            raise FleetctlError(f"there is no externalkey {name}")
        await transport.commit([], [Delete(key=key)])
