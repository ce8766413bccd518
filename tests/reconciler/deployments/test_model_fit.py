"""Groups that can serve a model: the same formation as for a deployment, with the loads that fit."""

from dataclasses import replace

from reconciler.deployments.model_fit import fit_group, fit_nodes
from reconciler.placement.inputs import PlacementRequest, request_for
from tests.support.reconciler_world import group, mac
from tests.support.world import deployment


def with_load(request: PlacementRequest, **load: int) -> PlacementRequest:
    return replace(request, spec=request.spec.model_copy(update=load))


def test_a_group_serves_what_no_member_serves_and_its_limit_is_the_last_that_fits() -> None:
    request, macs = request_for(deployment()), {name: mac(name) for name in "ab"}
    assert all(node.refusal is not None for node in fit_nodes(request, list(macs.values())))
    fit = fit_group(request, group(), macs)
    assert (fit.refusal, fit.nodes) == (None, ("a", "b"))
    most = fit.limits.highest_concurrency
    assert 1 <= most < 1024
    assert fit_group(with_load(request, concurrency=most), group(), macs).refusal is None
    beyond = fit_group(with_load(request, concurrency=most + 1), group(), macs)
    assert beyond.refusal is not None
    assert beyond.refusal.reason == "InsufficientMemory"


def test_a_group_names_the_member_that_keeps_it_from_forming() -> None:
    macs = {"a": mac("a"), "b": mac("b", is_ready=False)}
    why = fit_group(request_for(deployment()), group(), macs).refusal
    assert why is not None
    assert (why.reason, why.message.split(":")[0]) == ("NodeNotReady", "b")
