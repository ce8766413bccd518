"""`fleetctl create externalkey`: stores the API key of an external server, from a file or standard input."""

from typing import Any

import click
from pydantic import SecretStr

from fleetctl.cli.arguments import reason_option
from fleetctl.cli.connect import run, store_options
from fleetctl.fleets import stored_tokens
from machinery.clock import SystemClock
from schemas.external import parse_url
from schemas.records import ExternalKey

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
    stored_tokens.check_name(name)
    if remove:
        run(stored_tokens.remove_token("externalkey", name, options))
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
        name=name,
        url=url,
        key=SecretStr(stored_tokens.read_token(token_file)),
        created=SystemClock().now(),
    )
    run(stored_tokens.store_token("externalkey", made, options))
    click.echo(f"externalkey/{name} stored for {origin}")
