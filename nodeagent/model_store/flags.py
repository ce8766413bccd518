"""The flags of the agent about the disk of its models."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click

from models.model_store.collection import CollectionPolicy
from schemas import quantity

C = TypeVar("C", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDiskLimits:
    """Limits of the disk with the models."""

    collection: CollectionPolicy = field(default_factory=CollectionPolicy)
    """Fullness at which unused models are removed."""
    reserve_bytes: int = 0
    """Bytes that no fetch takes."""


def model_disk_flags(command: C) -> C:
    """Add the flags to a command."""
    reserve = click.option(
        "--disk-reserve",
        default="0",
        show_default=True,
        envvar="FLEET_DISK_RESERVE",
        help="Part of the models' disk that fetches leave free, such as 20Gi.",
    )
    high = click.option(
        "--model-gc-high-threshold",
        type=click.IntRange(1, 100),
        default=85,
        show_default=True,
        envvar="FLEET_MODEL_GC_HIGH_THRESHOLD",
        help="Percentage of the models' disk in use at which unused models are removed.",
    )
    low = click.option(
        "--model-gc-low-threshold",
        type=click.IntRange(0, 99),
        default=75,
        show_default=True,
        envvar="FLEET_MODEL_GC_LOW_THRESHOLD",
        help="Percentage of the models' disk in use at which the removal of unused models ends.",
    )
    return reserve(high(low(command)))


def model_disk_limits(options: dict[str, Any]) -> ModelDiskLimits:
    """Return the limits from the flags. Raises click.UsageError."""
    high, low = options["model_gc_high_threshold"], options["model_gc_low_threshold"]
    if low >= high:
        raise click.UsageError(
            f"--model-gc-low-threshold: {low} must be below --model-gc-high-threshold, which is {high}"
        )
    try:
        reserve_bytes = quantity.parse(options["disk_reserve"])
    except ValueError as error:
        raise click.UsageError(f"--disk-reserve: {error}") from error
    policy = CollectionPolicy(start_percent=high, end_percent=low)
    return ModelDiskLimits(collection=policy, reserve_bytes=reserve_bytes)
