"""Ticket: the right to read something of one agent or gateway for a minute; who may write to the store may have one."""

from typing import Annotated

from pydantic import StringConstraints

from schemas.meta import ApiModel

TICKET_TTL_S = 60
"""How long a ticket's lease lives unless it is renewed."""


class Ticket(ApiModel):
    """What lies under `ticket/<holder>/<id>`, under a lease."""

    hash: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the secret, which only goes from fleetctl to the agent itself."""
    user: str = ""
    """Who asks, for the agent's log: `anna@studio`."""
