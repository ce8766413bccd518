"""The flags of the agent about the disk of its models."""

from dataclasses import dataclass, field
from typing import Any, Final

import click

from machinery.options import Option, options
from models.model_store.collection import CollectionPolicy
from schemas import quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDiskLimits:
    """Limits of the disk with the models."""

    collection: CollectionPolicy = field(default_factory=CollectionPolicy)
    """Fullness at which unused models are removed."""
    reserve_bytes: int = 0
    """Bytes that no fetch takes."""


model_disk_flags: Final = options(
    "FLEET",
    Option(
        "--disk-reserve",
        "Part of the models' disk that fetches leave free, such as 20Gi.",
        default="0",
    ),
    Option(
        "--model-gc-high-threshold",
        "Percentage of the models' disk in use at which unused models are removed.",
        type=click.IntRange(1, 100),
        default=85,
    ),
    Option(
        "--model-gc-low-threshold",
        "Percentage of the models' disk in use at which the removal of unused models ends.",
        type=click.IntRange(0, 99),
        default=75,
    ),
)


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
