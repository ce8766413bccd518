"""Placement: nodes that may run replicas of a deployment, and preferences among them."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from schemas import chips
from schemas.meta import ApiModel, LabelKey, Labels, LabelValue, ObjectName
from schemas.node import Taint, TaintEffect
from schemas.quantity import Quantity, parse

# The scores that placement adds up when several nodes fit (reconciler/placement/scores.py).
ScoreName = Literal[
    "speed", "hardware", "pool", "taints", "headroom", "packing", "siblings", "spreading",
    "movement", "locality",
]  # fmt: skip
Profile = Literal["Balanced", "BinPack", "Spread", "HardwareAware"]


class Toleration(ApiModel):
    """A taint that does not keep this deployment's replicas away, as in Kubernetes."""

    key: LabelKey | Literal[""] = ""
    """The taint's key. Default: every taint, with operator Exists."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Equal: the values must be equal. Exists: any value matches."""
    value: LabelValue = ""
    """The taint's value."""
    effect: TaintEffect | None = None
    """The taint's effect. Default: every effect."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.key and self.operator == "Equal":
            raise ValueError(
                "has no key; name the taint, or write operator: Exists to tolerate all taints"
            )
        if self.value and self.operator == "Exists":
            raise ValueError("has a value, which operator: Exists ignores; remove one of them")
        return self


class AntiAffinity(ApiModel):
    """Other deployments whose replicas must not run on the same Mac; it applies to both sides."""

    deployments: tuple[ObjectName, ...] = ()
    """ModelDeployments by name."""
    match_labels: Labels = Field(default_factory=dict)
    """ModelDeployments that carry all of these labels."""


Weight = Annotated[int, Field(ge=0, le=100)]


class ScoreWeights(ApiModel):
    """Weights of the scores where several nodes fit. Default of each: the profile's weight."""

    speed: Weight | None = None
    """Memory bandwidth, which limits the speed of decoding."""
    hardware: Weight | None = None
    """Chip, GPU cores and memory."""
    pool: Weight | None = None
    """The priority of the node's pools."""
    taints: Weight | None = None
    """No taint with effect PreferNoSchedule."""
    headroom: Weight | None = None
    """Memory that would be left."""
    packing: Weight | None = None
    """Memory that would be used."""
    siblings: Weight | None = None
    """Few replicas of the same deployment on the node."""
    spreading: Weight | None = None
    """Few of them on nodes with the same labels (spreadBy)."""
    movement: Weight | None = None
    """A replica of the same deployment that is about to end there: its files are still in memory."""
    locality: Weight | None = None
    """Few bytes of the model that the node would have to fetch first."""


class SizeMinimum(ApiModel):
    """The least Mac for a model: the thresholds of its size tier, in place of those for its number of parameters."""

    min_gpu_cores: Annotated[int, Field(ge=0, le=1024)] = 0
    """The fewest GPU cores."""
    min_memory: Quantity | None = None
    """The least unified memory, such as "64Gi"."""
    preferred_chips: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """Chip names such as "Apple M4 Max", any of them; empty means every chip."""
    preferred_nodes: tuple[ObjectName, ...] = ()
    """Nodes by name, any of them; empty means every node."""

    @model_validator(mode="after")
    def _sets_something(self) -> Self:
        if self == type(self).model_construct():
            raise ValueError(
                "sets no threshold; set minGpuCores, minMemory, preferredChips or preferredNodes, or write tier: Off"
            )
        return self


SizeTierChoice = Literal["Auto", "Off"] | SizeMinimum


def is_large_enough(
    tier: SizeTierChoice,
    parameters: int,
    *,
    node: str,
    chip: str,
    gpu_cores: int,
    memory_bytes: int,
) -> bool:
    """Return whether a Mac meets the size tier of a model; placement and routing both ask here.

    `parameters`: of the model, 0 if the number is not known; then every Mac meets the tier Auto.
    """
    if isinstance(tier, SizeMinimum):
        return (
            gpu_cores >= tier.min_gpu_cores
            and (tier.min_memory is None or memory_bytes >= parse(tier.min_memory))
            and (not tier.preferred_chips or chip in tier.preferred_chips)
            and (not tier.preferred_nodes or node in tier.preferred_nodes)
        )
    size = chips.size_tier(parameters) if tier == "Auto" else None
    return chips.meets_tier(size, gpu_cores=gpu_cores, memory_bytes=memory_bytes)


def _few(keys: tuple[str, ...]) -> tuple[str, ...]:
    if len(keys) > 4:
        raise ValueError(f"names {len(keys)} labels; at most 4 are allowed")
    return keys


class Placement(ApiModel):
    """Nodes that may run replicas, and preferences among them."""

    pools: tuple[ObjectName, ...] = ()
    """NodePools whose nodes may run replicas; empty means every node."""
    node_selector: Labels = Field(default_factory=dict)
    """Labels that a node must carry, all of them."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that do not keep replicas away."""
    chips: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """Chip names such as "Apple M4 Pro", any of them; empty means every chip."""
    min_gpu_cores: Annotated[int, Field(ge=0, le=1024)] = 0
    """The fewest GPU cores that a node must have."""
    tier: SizeTierChoice = "Auto"
    """Auto: nodes that are large enough for a model of this size (such as 30 GPU cores and 64 GiB from 30 billion
    parameters on) are preferred; others are used only if none of them fits. Off: size does not matter. An object with
    minGpuCores, minMemory, preferredChips or preferredNodes prefers the nodes that meet all of these. The strategy
    HardwareAware uses the same."""
    anti_affinity: AntiAffinity | None = None
    """Deployments that must not run on the same Mac."""
    max_replicas_per_node: Annotated[int, Field(ge=1, le=1000)] | None = None
    """The most replicas of this deployment on one Mac."""
    spread_by: Annotated[tuple[LabelKey, ...], AfterValidator(_few)] = ()
    """Labels of nodes, such as rack or site, over whose values replicas are spread evenly."""
    profile: Profile = "Balanced"
    """Preferences where several nodes fit. Balanced: few replicas of this deployment on one Mac, free memory,
    speed. BinPack: fill Macs up. Spread: far apart. HardwareAware: the best hardware first."""
    weights: ScoreWeights = ScoreWeights()
    """Weights of single scores, in place of the profile's."""


def tolerates(tolerations: tuple[Toleration, ...], taint: Taint) -> bool:
    """Return whether one of the tolerations matches the taint."""
    return any(
        toleration.key in ("", taint.key)
        and toleration.effect in (None, taint.effect)
        and (toleration.operator == "Exists" or toleration.value == taint.value)
        for toleration in tolerations
    )
