"""The flags that name a repository of a hub, for commands that ask the hub themselves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import ValidationError

from fleetctl.cli.errors import FleetctlError
from machinery.process_secrets import read_secret_file
from models.hub.fleet_hub import FleetListings
from models.hub.hub_settings import hub_endpoint_option, hub_settings
from models.hub.model_hub import ModelHub, check_repo
from schemas.deployment import HubReference, HubSource, is_fleet_repo

_NO_FLEET = FleetListings()


def source_option(command: Any) -> Any:
    """Add the flag --source to a command."""
    return click.option(
        "--source",
        type=click.Choice(get_args(HubSource)),
        help="Kind of hub (default: huggingface, or modelscope for an endpoint of modelscope.cn).",
    )(command)


def hub_options(command: Any) -> Any:
    """Add the flags --source, --revision, --hub-endpoint, --modelscope-endpoint and --hub-token-file to a command."""
    token = click.option(
        "--hub-token-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with a token of the hub, for private and gated repositories.",
    )
    revision = click.option(
        "--revision", help="Branch, tag or commit (default: main; master of modelscope)."
    )
    return source_option(revision(hub_endpoint_option(token(command))))


def read_token(options: dict[str, Any]) -> str:
    """Return the token of --hub-token-file; "" without the flag.

    Raises:
        OSError: the file cannot be read, or others may read it.
        ValueError: it is no text in ASCII.

    """
    file: Path | None = options["hub_token_file"]
    return "" if file is None else read_secret_file(file).decode("ascii").strip()


def hub_reference(
    repo: str, options: dict[str, Any], patterns: tuple[str, ...] = ()
) -> HubReference:
    """Return the reference that the flags make.

    Raises:
        FleetctlError: a part of it is malformed.
        ValueError: it is no repository.
        click.UsageError: an endpoint is no address.

    """
    check_repo(repo)
    settings = hub_settings(options)
    is_modelscope = options["source"] == "modelscope"
    endpoint = settings.modelscope_endpoint if is_modelscope else settings.endpoint
    fields = {
        "repo": repo,
        "source": options["source"],
        "endpoint": "" if is_fleet_repo(repo) else endpoint,
        "revision": options["revision"],
        "files": patterns,
    }
    try:
        return HubReference.model_validate({name: one for name, one in fields.items() if one})
    except ValidationError as error:
        first = error.errors()[0]
        raise FleetctlError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@asynccontextmanager
async def pinned_hub(
    source: HubReference, options: dict[str, Any], token: str, fleet: FleetListings = _NO_FLEET
) -> AsyncIterator[tuple[ModelHub, HubReference]]:
    """Yield the hub of a reference, with the reference pinned to the commit that it is now.

    `fleet` knows the models that Macs made; without it, they are refused.

    Raises:
        ModelFetchError: the hub refuses, or does not answer.

    """
    async with replace(hub_settings(options), fleet=fleet).open() as factory:
        commit = await factory(source, token).resolve(source.repo, source.revision)
        pinned = source.pinned_to(commit, None)
        yield factory(pinned, token), pinned
