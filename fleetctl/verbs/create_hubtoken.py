"""`fleetctl create hubtoken`: stores a token for a model hub. It is read from a file or standard input, never from flags."""

from typing import Any

import click
from pydantic import SecretStr, ValidationError

from fleetctl.cli.arguments import reason_option
from fleetctl.cli.connect import run, store_options
from fleetctl.fleets import stored_tokens
from machinery.clock import SystemClock
from models.hub.model_hub import DEFAULT_ENDPOINT
from schemas.records import HubToken

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
    stored_tokens.check_name(name)
    if remove:
        run(stored_tokens.remove_token("hubtoken", name, options))
        click.echo(f"hubtoken/{name} deleted")
        return
    if token_file is None:
        raise click.UsageError("give --token-file FILE, or --token-file - for standard input")
    try:
        made = HubToken(
            name=name,
            endpoint=endpoint,
            token=SecretStr(stored_tokens.read_token(token_file)),
            created=SystemClock().now(),
        )
    except ValidationError as error:
        # The message of the token's own field could quote it; the endpoint is the only other one.
        raise click.UsageError(
            f"--endpoint: {endpoint[:200]!r} is no address; expected one like {DEFAULT_ENDPOINT}"
        ) from error
    run(stored_tokens.store_token("hubtoken", made, options))
    click.echo(f"hubtoken/{name} stored for {endpoint}")
