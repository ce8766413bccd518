"""Hubs of one process: the default endpoint, the shared HTTP session, and the tokens that the store has for hosts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import click

from machinery.options import Option, options
from models.hub.connection import open_hub_session
from models.hub.file_selection import DEFAULT_PATTERNS
from models.hub.fleet_hub import FleetHub, FleetListings
from models.hub.huggingface import HuggingFaceHub
from models.hub.model_hub import DEFAULT_ENDPOINT, MODELSCOPE_ENDPOINT, ModelHub
from models.hub.modelscope import ModelScopeHub
from schemas.deployment import DEFAULT_BRANCHES, HubReference


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
    modelscope_endpoint: str = MODELSCOPE_ENDPOINT
    """The same for references to ModelScope."""
    fleet: FleetListings = field(default_factory=FleetListings)
    """The models that the Macs of the fleet made; the default knows none."""

    def endpoint_of(self, source: HubReference) -> str:
        """Return the endpoint that a reference is read from, without a slash at its end; "" for the fleet's own models."""
        if source.is_of_fleet:
            return ""
        own = self.modelscope_endpoint if source.source == "modelscope" else self.endpoint
        return (source.endpoint or own).rstrip("/")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HubFactory]:
        """Yield the factory of hubs, which share one HTTP session until the end of the block."""
        async with open_hub_session() as session:

            def make(source: HubReference, token: str) -> ModelHub:
                endpoint = self.endpoint_of(source)
                if source.is_of_fleet:
                    return FleetHub(self.fleet)
                if source.source == "huggingface":
                    return HuggingFaceHub(session, endpoint=endpoint, token=token)
                return ModelScopeHub(
                    session,
                    endpoint=endpoint,
                    token=token,
                    branch=(source.branch or DEFAULT_BRANCHES[source.source])
                    if source.is_pinned
                    else source.revision,
                    patterns=source.files or DEFAULT_PATTERNS,
                )

            yield make


hub_endpoint_option: Final = options(
    None,
    Option(
        "--hub-endpoint",
        "Hugging Face's hub, or a mirror of it, where no endpoint is named.",
        default=DEFAULT_ENDPOINT,
        variable="HF_ENDPOINT",
        show_envvar=True,
    ),
    Option(
        "--modelscope-endpoint",
        "ModelScope, or a mirror of it, where no endpoint is named.",
        default=MODELSCOPE_ENDPOINT,
        variable="MODELSCOPE_ENDPOINT",
        show_envvar=True,
    ),
)
"""Adds --hub-endpoint and --modelscope-endpoint to a command."""


def hub_settings(options: dict[str, Any]) -> HubSettings:
    """Return the settings from the flags.

    Raises:
        click.UsageError: an endpoint is no address.

    """
    return HubSettings(
        endpoint=_address(options, "hub_endpoint"),
        modelscope_endpoint=_address(options, "modelscope_endpoint"),
    )


def _address(options: dict[str, Any], name: str) -> str:
    endpoint = str(options[name]).rstrip("/")
    if not endpoint.startswith(("https://", "http://")):
        flag = f"--{name.replace('_', '-')}"
        raise click.UsageError(
            f"{flag}: {endpoint[:200]!r} is no address; expected one like {DEFAULT_ENDPOINT}"
        )
    return endpoint
