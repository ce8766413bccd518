"""Hubs of one process: the default endpoint, the shared HTTP session, and the tokens that the store has for hosts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import click

from models.hub.connection import open_hub_session
from models.hub.huggingface import HuggingFaceHub
from models.hub.model_hub import DEFAULT_ENDPOINT, ModelHub
from schemas.deployment import HubReference


class HubFactory(Protocol):
    """Makes the hub of a reference."""

    def __call__(self, source: HubReference, token: str) -> ModelHub:
        """Return the hub at the reference's endpoint, or at the process's own; `token` may be empty."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """The flags of a process that talks to hubs."""

    endpoint: str = DEFAULT_ENDPOINT
    """Endpoint for references that name none."""

    def endpoint_of(self, source: HubReference) -> str:
        """Return the endpoint that a reference is read from, without a slash at its end."""
        return (source.endpoint or self.endpoint).rstrip("/")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HubFactory]:
        """Yield the factory of hubs, which share one HTTP session until the end of the block."""
        async with open_hub_session() as session:

            def make(source: HubReference, token: str) -> ModelHub:
                return HuggingFaceHub(session, endpoint=self.endpoint_of(source), token=token)

            yield make


def hub_endpoint_option(command: Any) -> Any:
    """Add the flag --hub-endpoint to a command."""
    return click.option(
        "--hub-endpoint",
        default=DEFAULT_ENDPOINT,
        show_default=True,
        envvar="HF_ENDPOINT",
        help="Model hub, or a mirror of it, for deployments that name no endpoint.",
    )(command)


def hub_settings(options: dict[str, Any]) -> HubSettings:
    """Return the settings from the flags.

    Raises:
        click.UsageError: the endpoint is no address.

    """
    endpoint = str(options["hub_endpoint"]).rstrip("/")
    if not endpoint.startswith(("https://", "http://")):
        raise click.UsageError(
            f"--hub-endpoint: {endpoint[:200]!r} is no address; expected one like {DEFAULT_ENDPOINT}"
        )
    return HubSettings(endpoint=endpoint)
