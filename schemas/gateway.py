"""GatewayLease: that a gateway is there, and where its figures are read."""

from typing import Annotated

from pydantic import StringConstraints

from schemas.meta import ApiModel


class GatewayLease(ApiModel):
    """The value of a gateway's lease key; that the key exists is the sign of life."""

    url: Annotated[str, StringConstraints(pattern=r"^http://[^\s/?#@]+$", max_length=300)]
    """Base address of the gateway for the reconciler, such as http://10.0.0.5:4000."""
    version: str
    """Which release it is."""
    asks_for_keys: bool = True
    """Whether it asks for API keys: only those that do share keys' rates. Releases before this did not say."""
