"""The verb `fleetctl models update-catalogue`: installs a newer catalogue of models, apart from releases."""

from pathlib import Path

import click

from fleetctl.catalogue_file import install, installed_path
from fleetctl.cli.connect import run

_HELP = """Install a newer catalogue of well-known models, for `models search` and `models fit`.

\b
  fleetctl models update-catalogue https://example.com/mlx-fleet/catalogue.json
  fleetctl models update-catalogue ./catalogue.json --allowed-signers ./keys

SOURCE is a path, or an address that begins with https://; its signature is beside it, with .sig at the end of the name.
Without a valid signature of catalogue@mlx-fleet, or if it is malformed or not newer, nothing is changed. It is kept
beside the configuration file; remove it there to use the list of the release.
"""


@click.command("update-catalogue", help=_HELP)
@click.argument("source")
@click.option(
    "--allowed-signers",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the public keys that may sign it, as ssh-keygen reads it (default: those of this release).",
)
def update_catalogue(source: str, allowed_signers: Path | None) -> None:
    """Install a newer catalogue of well-known models, for `models search` and `models fit`."""
    listed = run(install(source, allowed_signers))
    click.echo(
        f"the list of {listed.date} with {len(listed.models)} models is in use: {installed_path()}"
    )
