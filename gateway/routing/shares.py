"""Makes shares ready for choosing, so that a request costs the same among ten engines and among a thousand. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from gateway.routing.table import Arm, Pool, Share, Target, Trial
from schemas.routing import Routing, ScoreWeights

_NO_TRIALS: Mapping[str, Trial] = MappingProxyType({})
_USUAL = Routing()


class ShareMaker:
    """Makes the shares of one table."""

    def __init__(self, trials: Mapping[str, Trial] = _NO_TRIALS, site: str = "") -> None:
        """`trials` by deployment; `site` is the gateway's own, empty if it has none."""
        self._trials = trials
        self._site = site

    def share(
        self,
        deployments: Sequence[str],
        *,
        leased: Iterable[Target] = (),
        orphans: Iterable[Target] = (),
        weight: int = 1,
        routing: Routing = _USUAL,
    ) -> Share:
        """Return the share; the order of what is given makes no difference."""
        here, gone = _sorted(leased), _sorted(orphans)
        preference = _Preference(routing, self._site)
        return Share(
            deployments=tuple(deployments),
            weight=weight,
            leased=here,
            orphans=gone,
            arms=tuple(_arms(here, self._trials, preference)),
            last=Arm(weight=1.0, pools=preference.pools(gone)),
            routing=routing,
            score=_score(routing.weights),
            minds_prefixes=routing.prefix_affinity.enabled
            and routing.strategy not in ("RoundRobin", "Random"),
        )


def _score(weights: ScoreWeights) -> tuple[float, float, float, float]:
    parts = (
        weights.model_loaded,
        weights.memory_headroom,
        weights.queue_depth,
        weights.prefix_affinity,
    )
    loaded, memory, queue, prefix = (part / sum(parts) for part in parts)
    return loaded, memory, queue, prefix


def _sorted(targets: Iterable[Target]) -> tuple[Target, ...]:
    return tuple(sorted(targets, key=lambda t: (t.replica, t.origin, t.version)))


def _arms(
    leased: Sequence[Target], trials: Mapping[str, Trial], preference: "_Preference"
) -> Iterator[Arm]:
    """Yield who may be asked, and how often: a version on trial gets its part of its deployment's part.

    The new versions come first, then their old ones: a growing weight moves requests from old to new only.
    """
    others: list[Target] = []
    old_arms = []
    for name in dict.fromkeys(target.deployment for target in leased):
        mine, trial = [t for t in leased if t.deployment == name], trials.get(name)
        new = [t for t in mine if trial is not None and t.template == trial.template]
        # Where only one of the versions can be asked, it gets everything.
        if trial is None or not new or len(new) == len(mine):
            others += mine
            continue
        old = [t for t in mine if t.template != trial.template]
        part = len(mine) * trial.weight / 100
        yield Arm(weight=part, pools=preference.pools(new))
        old_arms.append(Arm(weight=len(mine) - part, pools=preference.pools(old)))
    yield from old_arms
    if others:
        yield Arm(weight=float(len(others)), pools=preference.pools(others))


class _Preference:
    """Who is asked only if others cannot be, whatever the load."""

    def __init__(self, routing: Routing, site: str) -> None:
        self._site = site if routing.site_affinity else ""
        self._minds_size = routing.strategy == "HardwareAware"

    def pools(self, targets: Sequence[Target]) -> tuple[Pool, ...]:
        ranked: dict[tuple[bool, bool], list[Target]] = {}
        for target in targets:
            is_far = bool(self._site) and target.site != self._site
            ranked.setdefault((is_far, self._minds_size and not target.is_fit), []).append(target)
        return tuple(
            Pool(targets=tuple(some), by_mark=MappingProxyType({t.mark: t for t in some}))
            for _, some in sorted(ranked.items(), key=lambda item: item[0])
        )
