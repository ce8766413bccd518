"""Cases in their order, with their repetitions; and the objects that are listed."""

from dataclasses import dataclass
from datetime import UTC, datetime

from bench.result import sized
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource
from schemas.meta import ObjectMeta
from schemas.placement import Placement
from store import codec

UNARY_S = sized(0.4, smoke=0.05)
CONCURRENCIES = (1, 16, 64)
COUNTS = sized((5_000, 50_000), smoke=(50, 500))
"""Objects that are listed: few, and many."""
TWICE, THRICE = sized((2, 3), smoke=(1, 1))
AGENTS, TTL_S = sized(1_000, smoke=20), 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload with its arguments."""

    name: str
    work: str
    arguments: dict[str, object]
    rounds: int = 1
    rounds_of_peers: int = 1
    limit_s: float = 30.0


def document(number: int) -> bytes:
    """Return what the store holds of a ModelDeployment that somebody uses."""
    name, began = f"model-{number:06}", datetime(2026, 1, 1, tzinfo=UTC)
    deployment = ModelDeployment(
        metadata=ObjectMeta(
            name=name,
            labels={"team": f"team-{number % 17}", "tier": "gold"},
            annotations={"note": "what this model is for, in a sentence that somebody wrote"},
            uid=f"{number:032x}",
            generation=3,
            creation_timestamp=began,
            finalizers=("fleet/replicas",),
        ),
        spec=ModelDeploymentSpec(
            model=ModelSource(path=f"mlx-community/Model-{number}-4bit"),
            served_names=(f"{name}-chat", f"{name}-code"),
            replicas=3,
            context_length=32_768,
            placement=Placement(pools=("studio",), node_selector={"chip": "m3-ultra"}),
        ),
    )
    return codec.encode_spec(deployment)


def prefix(count: int) -> str:
    return f"/bench/list-{count}/"


def cases() -> list[Case]:
    """Return all cases in order; lists come after puts, for they make the store large."""
    text = document(0).decode()
    fanout: dict[str, object] = {
        "watchers": 20,
        "count": sized(1_000, smoke=50),
        "document": text,
    }
    beat: dict[str, object] = {"agents": AGENTS, "ttl_s": TTL_S, "periods": sized(2, smoke=1)}
    return [
        *(
            Case(
                name=f"{work.removesuffix('s')}_c{at_once}",
                work=work,
                arguments={"at_once": at_once, "seconds": UNARY_S},
                rounds=THRICE,
                rounds_of_peers=THRICE,
            )
            for work in ("puts", "gets")
            for at_once in CONCURRENCIES
        ),
        Case(
            name="latency",
            work="latency",
            arguments={"count": sized(200, smoke=20), "document": text},
            rounds=TWICE,
            rounds_of_peers=TWICE,
        ),
        Case(name="fanout_watch", work="fanout", arguments={"how": "watch", **fanout}),
        Case(
            name="fanout_informer",
            work="fanout",
            arguments={"how": "inform", **fanout},
            rounds_of_peers=0,
        ),
        Case(name="leases", work="leases", arguments={"is_apart": False, **beat}, rounds=TWICE),
        Case(
            name="leases_apart",
            work="leases",
            arguments={"is_apart": True, **beat},
            rounds=TWICE,
            rounds_of_peers=0,
        ),
        *(
            Case(
                name=f"list_{count}",
                work="lists",
                arguments={"prefix": prefix(count), "count": count},
                rounds=THRICE if count == COUNTS[0] else 1,
                rounds_of_peers=THRICE if count == COUNTS[0] else 1,
            )
            for count in COUNTS
        ),
    ]
