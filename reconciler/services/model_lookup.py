"""One lookup of a deployment's hub model: its commit, and what the memory proof needs of it.

The leader stores the answer; a plan only supposes it.
"""

import asyncio
from datetime import datetime
from typing import Final

from models.hub.errors import ModelFetchError
from models.hub.model_hub import ModelHub
from models.hub.remote_inspection import (
    config_text,
    inspect_remote,
    snapshot_files,
    snapshot_weights,
)
from models.model_files import ModelUnusableError
from schemas.deployment import ModelDeployment
from schemas.meta import HUB_REFRESHED_AT
from schemas.model_snapshot import ModelSnapshot

# The largest models have 300 weight files, each with a header to read.
_LIMIT_S: Final = 180.0

LOOKUP_ERRORS: Final = (ModelFetchError, ModelUnusableError, TimeoutError, ValueError)
"""Errors of a lookup; `reason_of` explains each."""


async def look_up(
    hub: ModelHub, deployment: ModelDeployment, *, endpoint: str, now: datetime
) -> ModelSnapshot:
    """Return the snapshot of the deployment's hub model as the hub has it now; `endpoint` is "" for the fleet itself.

    Raises:
        ModelFetchError: the hub refuses or does not answer.
        ModelUnusableError: the model cannot be served.
        TimeoutError: the hub is slow.
        ValueError: its answer is malformed.

    """
    source = deployment.spec.model.hub
    assert source is not None
    async with asyncio.timeout(_LIMIT_S):
        commit = await hub.resolve(source.repo, source.revision)
        remote = await inspect_remote(hub, source.repo, commit, source.files)
    return ModelSnapshot(
        deployment=deployment.name,
        uid=deployment.metadata.uid,
        source=source,
        endpoint=endpoint or None,
        refreshed_at=deployment.metadata.annotations.get(HUB_REFRESHED_AT, ""),
        commit=commit,
        resolved_at=now,
        files=len(remote.files),
        size_bytes=remote.size_bytes,
        large_files=snapshot_files(remote.files),
        config=config_text(remote.config),
        weights=snapshot_weights(remote.weights),
        headers=remote.headers,
    )


def reason_of(error: Exception) -> tuple[str, str]:
    """Return reason and message of a failed lookup."""
    match error:
        case ModelFetchError() | ModelUnusableError():
            return error.reason, str(error)
        case TimeoutError():
            return "SourceUnreachable", f"the hub took more than {_LIMIT_S:.0f} s"
        case _:
            return "ListingRefused", str(error)
