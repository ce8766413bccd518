"""What an apply is asked to do, and what it did. Values; carries out nothing."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from manifests.errors import ApplyError, names
from manifests.merge3 import Force
from manifests.ownership import Clash
from manifests.plan import How
from manifests.tree import key_of
from schemas.meta import ApiObject, ObjectKey

Result: TypeAlias = Literal["created", "configured", "unchanged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one object."""

    obj: ApiObject
    """As it is in the store now."""
    result: Result


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOptions:
    """Who applies, and how far it goes."""

    manager: str = "fleetctl"
    """The writer whose manifests these are: `fleetctl`, `gitsource/<name>`."""
    force: Force = False
    """Whether the manifests win where others changed the same fields, and where other manifests say otherwise; "drift"
    puts back what others changed, but leaves what other manifests say."""
    apply_set: str = ""
    """The set that the objects are of; empty is none."""
    prune: bool = False
    """Whether what the set's manifests say no more is deleted."""
    prune_kinds: Collection[str] | None = None
    """Of which kinds only; None stands for all."""
    server_dry_run: bool = False
    """Whether to do everything but write."""

    @property
    def how(self) -> How:
        return How(manager=self.manager, force=self.force, apply_set=self.apply_set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What an apply did, or would do."""

    outcomes: tuple[Outcome, ...]
    """What became of each object, in the order of the manifests."""
    pruned: tuple[ObjectKey, ...] = ()
    """What was deleted, or began to go; in this order."""
    kept: tuple[Clash, ...] = ()
    """What stays as others set it, though manifests say something else."""


class PruneError(ApplyError):
    """Everything was written, and something of what is to go could not be deleted; the set still holds it."""

    def __init__(self, reasons: Mapping[ObjectKey, str], applied: Applied) -> None:
        self.reasons = dict(reasons)
        self.applied = applied
        """What was done."""
        written = tuple(key_of(one.obj) for one in applied.outcomes)
        super().__init__("pruning failed", written=written, missing=tuple(reasons))
        told = "; ".join(reasons.values())
        what = f"what is declared was written; pruning failed: {told}. Not pruned: {names(self.missing)}"
        self.args = (f"{what}. Applying again is safe, and tries again",)
