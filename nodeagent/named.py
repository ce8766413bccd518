"""Which models are named in the store beside those that deployments name themselves. Pure."""

from collections.abc import Iterable

from schemas.deployment import ModelDeployment
from schemas.shardgroup import ShardGroup


def fallback_models(
    deployments: Iterable[ModelDeployment], groups: Iterable[ShardGroup]
) -> set[str]:
    """Return the models that deployments may fall back on, on the groups that they are split over."""
    wishes = {found.spec.sharding for found in deployments}
    return {
        one.model
        for group in groups
        if "Auto" in wishes or group.name in wishes
        for one in group.spec.fallbacks
        if one.model is not None
    }
