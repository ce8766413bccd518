"""Load balancing of other tools as spec.routing, and the deployments that carry it. Pure."""

from collections.abc import Mapping, Sequence
from math import gcd

from fleetctl.imports.foreign import Foreign
from fleetctl.imports.made import Draft
from fleetctl.imports.naming import object_name, served
from manifests import yamlio
from manifests.tree import Tree
from schemas import duration

# schemas.routing.Weight ends there.
_MOST = 1000


def span(milliseconds: float) -> str:
    """Return the time as a duration: 1500 is `1s500ms`."""
    whole, rest = divmod(round(milliseconds), 1000)
    parts = (duration.show(whole) if whole else "", f"{rest}ms" if rest else "")
    return "".join(parts) or "0s"


def weights(source: Foreign, named: Mapping[str, tuple[str | int, ...]]) -> dict[str, Tree] | None:
    """Return whole weights in the proportion of the file's fractions; None where it has none.

    `named` is our name of each weight, and where the file says it.
    """
    found = {ours: source.number(*path) for ours, path in named.items()}
    said = {ours: value for ours, value in found.items() if value is not None}
    if not said:
        return None
    thousandths = {ours: round(value * 1000) for ours, value in said.items()}
    common = gcd(*thousandths.values()) or 1
    least = {ours: value // common for ours, value in thousandths.items()}
    # 0.4, 0.2, 0.3 and 0.1 read best as 40, 20, 30 and 10.
    total = sum(least.values())
    factor = 100 // total if total and 100 % total == 0 else 1
    most = max(least.values(), default=0) * factor
    if most > _MOST:
        return {ours: round(value * _MOST / max(said.values())) for ours, value in said.items()}
    return {ours: value * factor for ours, value in least.items()}


def deployments(
    source: Foreign, models: Sequence[str], routing: dict[str, Tree], pools: Sequence[str]
) -> list[Draft]:
    """Return a deployment for each model that --model names."""
    made = []
    for path in models:
        name = object_name(path, "model")
        draft = Draft(kind="ModelDeployment", name=name, source=source)
        draft.put("spec.model.path", path)
        names: list[Tree] = [*served(name, path)]
        draft.put("spec.servedNames", names or None)
        fill(draft, routing, pools)
        made.append(draft)
    return made


def fill(draft: Draft, routing: dict[str, Tree], pools: Sequence[str]) -> None:
    """Say of a deployment where it may go, and how requests are shared out."""
    listed: list[Tree] = [*pools]
    draft.put("spec.placement.pools", listed or None)
    draft.put("spec.routing", routing or None)


def as_comment(routing: dict[str, Tree]) -> list[str]:
    """Return the routing as lines of a comment, for a file that names no model."""
    if not routing:
        return []
    body = yamlio.dump({"routing": routing}).splitlines()
    return [
        "The file names no model: write this below spec of each ModelDeployment, or name models with --model",
        *(f"  {line}" for line in body),
    ]
