"""Endpoints without a lease: how long they are used, and what ends them earlier."""

from datetime import UTC, datetime

import pytest

from gateway.routing.table import EngineEndpoint
from gateway.state.build_table import TableInputs
from gateway.state.orphan_endpoints import ORPHAN_S, OrphanEndpoint, orphans_of
from schemas.deployment import ModelDeployment
from tests.support.gateway_world import deployment, target


def inputs(*objects: ModelDeployment | EngineEndpoint) -> TableInputs:
    return TableInputs(
        deployments={o.name: o for o in objects if isinstance(o, ModelDeployment)},
        leased={o.replica: o for o in objects if isinstance(o, EngineEndpoint)},
        routes={},
        statuses={},
    )


GONE, LEASED = target("m-0"), target("m-1", port=2)


def deleting(name: str) -> ModelDeployment:
    made = deployment(name)
    metadata = made.metadata.model_copy(
        update={"deletion_timestamp": datetime(2026, 1, 1, tzinfo=UTC)}
    )
    return made.model_copy(update={"metadata": metadata})


@pytest.mark.parametrize(
    ("now", "known", "expected"),
    [
        pytest.param(inputs(deployment("m")), {}, ["m-0"], id="lease-lost"),
        pytest.param(inputs(), {}, [], id="deployment-deleted"),
        pytest.param(inputs(deleting("m")), {}, [], id="deployment-being-deleted"),
        pytest.param(
            inputs(deployment("m"), target("m-0", version=2)), {}, [], id="published-anew"
        ),
        pytest.param(
            inputs(deployment("m"), target("m-2", port=GONE.origin.port)),
            {},
            [],
            id="another-engine-at-its-address",
        ),
        pytest.param(
            inputs(deployment("m"), GONE),
            {"m-1": OrphanEndpoint(endpoint=LEASED, until_s=101.0)},
            ["m-1"],
            id="an-orphan-stays-one",
        ),
        pytest.param(
            inputs(deployment("m"), GONE),
            {"m-1": OrphanEndpoint(endpoint=LEASED, until_s=100.0)},
            [],
            id="until-its-time-is-over",
        ),
    ],
)
def test_orphans(now: TableInputs, known: dict[str, OrphanEndpoint], expected: list[str]) -> None:
    assert list(orphans_of(known, {"m-0": GONE}, now, 100.0)) == expected


def test_an_orphans_time_counts_from_the_loss_of_its_lease() -> None:
    now = inputs(deployment("m"))
    first = orphans_of({}, {"m-0": GONE}, now, 100.0)
    assert first["m-0"].until_s == 100.0 + ORPHAN_S
    assert orphans_of(first, {}, now, 200.0) == first
