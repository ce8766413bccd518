"""Expected answers of hubs about models of the catalogue, so that a preview places them before a hub was asked. Pure."""

from collections.abc import Iterable
from datetime import datetime
from typing import Final

import orjson

from models.catalogue import catalogue
from models.catalogue.catalogue import CatalogueEntry
from schemas.deployment import HubReference, ModelDeployment
from schemas.meta import HUB_REFRESHED_AT
from schemas.model_snapshot import ModelSnapshot, SnapshotWeights

_NO_COMMIT: Final = "0" * 40


def expected_snapshots(
    unresolved: Iterable[ModelDeployment], now: datetime
) -> tuple[ModelSnapshot, ...]:
    """Return the expected answers for the deployments whose repository the catalogue lists."""
    answers: list[ModelSnapshot] = []
    for deployment in unresolved:
        source = deployment.spec.model.hub
        if source is None or source.is_of_fleet:
            continue
        entry = catalogue.find(source.repo, catalogue.shipped_catalogue())
        if entry is not None:
            answers.append(_expected(deployment, source, entry, now))
    return tuple(answers)


def _expected(
    deployment: ModelDeployment, source: HubReference, entry: CatalogueEntry, now: datetime
) -> ModelSnapshot:
    weights = entry.facts.weights
    return ModelSnapshot(
        deployment=deployment.name,
        uid=deployment.metadata.uid,
        source=source,
        refreshed_at=deployment.metadata.annotations.get(HUB_REFRESHED_AT, ""),
        commit=_NO_COMMIT,
        resolved_at=now,
        files=1,
        size_bytes=weights.total_bytes,
        config=orjson.dumps(entry.model.config).decode(),
        weights=SnapshotWeights(
            total_bytes=weights.total_bytes,
            half_bytes=weights.half_bytes,
            replicated_bytes=weights.replicated_bytes,
            replicated_half_bytes=weights.replicated_half_bytes,
            parameters=weights.parameters,
            expert_bytes=weights.experts.total,
            expert_half_bytes=weights.experts.half,
            looked_up_bytes=weights.looked_up.total,
            looked_up_half_bytes=weights.looked_up.half,
        ),
    )
