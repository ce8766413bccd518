"""ApiKey: who may ask gateways for what, and how often. The key itself is known to its owner alone."""

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from schemas.deployment import ServedName
from schemas.meta import ApiModel, ObjectName

PREFIX = "sk-fleet-"
"""What every key begins with, so that scanners of repositories recognise one."""


class ApiKey(ApiModel):
    """One key as it is stored: its hash, and what it is good for."""

    name: ObjectName
    hash: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the key. A key has 256 random bits, so that a slow hash would protect nothing more."""
    created: datetime
    expires: datetime | None = None
    """From when on it is refused; None: never."""
    models: tuple[ServedName, ...] = ()
    """Names it may ask for, as clients write them; none: all."""
    is_admin: bool = False
    """Whether it may also read the admin API."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Prompt and answer together."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """How many requests may be under way at once, at each gateway."""
