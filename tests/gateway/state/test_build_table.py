"""The routing table: precedence of names, and reasons."""

import random
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from gateway.routing.selection import ChosenEndpoint, NoReadyEndpoint, choose
from gateway.routing.table import (
    CheckPolicy,
    EndpointHealth,
    EngineEndpoint,
    RoutingQuery,
    RoutingTable,
)
from gateway.state.build_table import (
    TableBuilder,
    TableInputs,
    build_table,
    endpoint_of,
)
from schemas.autoscaling import Autoscaling
from schemas.deployment import (
    ModelDeployment,
    ModelDeploymentStatus,
    ModelSource,
    NamedAdapter,
)
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from schemas.placement import Placement, SizeMinimum
from schemas.replica import EndpointHardware
from schemas.route import Backend, HeaderMatch, ModelRoute, ModelRouteSpec, RouteRule
from schemas.routing import CacheSharing, PrefixAffinity, Routing, Sessions
from schemas.wire.engine_address import EngineAddress
from tests.support.gateway_world import deployment, endpoint, route, target


def seen(
    *objects: ModelDeployment | ModelRoute | EngineEndpoint,
    statuses: dict[str, ModelDeploymentStatus] | None = None,
) -> TableInputs:
    return TableInputs(
        deployments={o.name: o for o in objects if isinstance(o, ModelDeployment)},
        routes={o.name: o for o in objects if isinstance(o, ModelRoute)},
        leased={o.replica: o for o in objects if isinstance(o, EngineEndpoint)},
        statuses=statuses or {},
    )


def serving(table: RoutingTable, name: str) -> list[str]:
    return [t.replica for backend in table.models[name].backends for t in backend.leased]


@pytest.mark.parametrize(
    ("objects", "name", "expected"),
    [
        pytest.param((deployment("a"), target("a-0", "a")), "a", ["a-0"], id="own-name"),
        pytest.param((deployment("a", "fast"), target("a-0", "a")), "fast", ["a-0"], id="served"),
        pytest.param(
            (
                deployment("a", "fast"),
                deployment("b", "fast"),
                target("b-0", "b"),
                target("a-0", "a"),
            ),
            "fast",
            ["a-0", "b-0"],
            id="a-tier-of-two",
        ),
        pytest.param(
            (deployment("a", "b"), deployment("b"), target("a-0", "a"), target("b-0", "b")),
            "b",
            ["b-0"],
            id="own-name-beats-served",
        ),
        pytest.param(
            (deployment("a"), deployment("b"), target("b-0", "b"), route("r", "a", b=1)),
            "a",
            ["b-0"],
            id="route-beats-own-name",
        ),
        pytest.param(
            (deployment("b"), target("b-0", "b"), route("r2", "x", a=1), route("r1", "x", b=1)),
            "x",
            ["b-0"],
            id="first-route-wins",
        ),
    ],
)
def test_names(
    objects: tuple[ModelDeployment | ModelRoute | EngineEndpoint, ...],
    name: str,
    expected: list[str],
) -> None:
    assert serving(build_table(seen(*objects), ()), name) == expected
    mixed = random.Random(1).sample(objects, len(objects))
    assert build_table(seen(*mixed), ()) == build_table(seen(*objects), ())


def test_an_endpoint_without_its_deployment_serves_no_name() -> None:
    assert build_table(seen(target("a-0", "a")), ()).models == {}


REFUSED = ("Placed", False, "InsufficientMemory", "no node has 40 GiB free")
PLACED = ("Placed", True, "Placed", "")
ROLLING = ("Progressing", True, "RollingOut", "0 of 1 replicas updated")
COMPLETE = ("Progressing", True, "RolloutComplete", "every replica runs revision 1")
UP = ("Available", True, "AllReplicasReady", "1 of 1 replicas ready")
DOWN = ("Available", False, "ReplicaNotReady", "0 of 1 replicas ready; a-0 on n: Loading")


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ((REFUSED, ROLLING), "InsufficientMemory: no node has 40 GiB free"),
        ((PLACED, ROLLING, DOWN), "ReplicaNotReady: 0 of 1 replicas ready; a-0 on n: Loading"),
        ((PLACED, COMPLETE, DOWN), "ReplicaNotReady: 0 of 1 replicas ready; a-0 on n: Loading"),
        ((PLACED, ROLLING), "RollingOut: 0 of 1 replicas updated"),
        # The reconciler has not noticed yet: what it last reported is no reason.
        ((PLACED, COMPLETE, UP), "its replicas ended a moment ago"),
        ((), "the reconciler has not reported on it"),
    ],
)
def test_the_reason_is_the_reconcilers(
    reported: tuple[tuple[str, bool, str, str], ...], expected: str
) -> None:
    conditions = tuple(
        Condition(type=kind, status=ConditionStatus(str(is_true)), reason=reason, message=message)
        for kind, is_true, reason, message in reported
    )
    status = ModelDeploymentStatus(conditions=conditions)
    table = build_table(seen(deployment("a"), statuses={"a": status}), ())
    assert expected in table.models["a"].reason


def test_reasons_without_a_status() -> None:
    objects = (deployment("zero", replicas=0), route("r", "x", gone=1), route("s", "y", zero=0))
    table = build_table(seen(*objects), ())
    assert "scaled to 0" in table.models["zero"].reason
    assert "gone does not exist" in table.models["x"].reason
    assert "weight 0" in table.models["y"].reason


def test_created_is_the_oldest_deployments() -> None:
    made = deployment("a")
    when = datetime(2026, 1, 1, tzinfo=UTC)
    made = made.model_copy(
        update={"metadata": made.metadata.model_copy(update={"creation_timestamp": when})}
    )
    table = build_table(seen(made, deployment("b"), route("r", "x", a=1, b=1)), ())
    assert table.models["x"].created == int(when.timestamp())


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://10.0.0.5:4100", EngineAddress("10.0.0.5", 4100)),
        ("unix:/s/4100.sock", EngineAddress("", 0, "/s/4100.sock")),
    ],
)
def test_the_url_of_an_endpoint_is_its_engines_address(url: str, origin: EngineAddress) -> None:
    assert endpoint_of(endpoint("m-0", "m", url), 1).origin == origin


def routed(**spec: object) -> ModelRoute:
    """Return a route of the name x to b, with further fields."""
    made = ModelRouteSpec(model="x", backends=(Backend(deployment="b"),))
    return ModelRoute(metadata=ObjectMeta(name="r"), spec=made.model_copy(update=spec))


def routing_as(name: str, routing: Routing) -> ModelDeployment:
    made = deployment(name)
    return made.model_copy(update={"spec": made.spec.model_copy(update={"routing": routing})})


TURNS, CHANCE = Routing(strategy="RoundRobin"), Routing(strategy="Random")
SHORT = Routing(sessions=Sessions(ttl="90s"), prefix_affinity=PrefixAffinity(enabled=False))
OFF = Routing(sessions=Sessions(enabled=False))


def test_names_with_the_same_routing_settings_have_the_same_source() -> None:
    own = ModelRoute(
        metadata=ObjectMeta(name="own"),
        spec=ModelRouteSpec(
            model="own", backends=(Backend(deployment="a"),), routing=Routing(strategy="Random")
        ),
    )
    plain = route("plain", "plain", a=1, b=9)
    table = build_table(seen(deployment("a", "fast"), deployment("b", "fast"), own, plain), ())
    sources = {name: model.routing_source for name, model in table.models.items()}
    assert sources == {
        "a": "ModelDeployment/a",
        "b": "ModelDeployment/b",
        "fast": "ModelDeployment/a",
        "own": "ModelRoute/own",
        "plain": "ModelDeployment/b",
    }


def test_each_backend_has_its_deployments_routing_unless_the_route_has_one() -> None:
    objects = (routing_as("a", CHANCE), routing_as("b", TURNS))
    both = (Backend(deployment="a", weight=1), Backend(deployment="b", weight=2))
    model = build_table(seen(*objects, routed(backends=both)), ()).models["x"]
    assert [backend.routing for backend in model.backends] == [CHANCE, TURNS]
    assert model.routing == TURNS, "what is not an engine's own goes by the heaviest"
    model = build_table(seen(*objects, routed(backends=both, routing=SHORT)), ()).models["x"]
    assert {backend.routing for backend in model.backends} == {SHORT}
    assert model.routing == SHORT


@pytest.mark.parametrize(
    ("routing", "session_s", "is_prefix_aware"),
    [
        (Routing(), 300.0, True),
        (SHORT, 90.0, False),
        (OFF, 0.0, True),
        (TURNS, 300.0, False),
        (CHANCE, 300.0, False),
    ],
)
def test_what_is_remembered(routing: Routing, session_s: float, is_prefix_aware: bool) -> None:
    model = build_table(seen(routing_as("a", routing)), ()).models["a"]
    assert (model.session_s, model.is_prefix_aware) == (session_s, is_prefix_aware)


@pytest.mark.parametrize(
    ("a", "b", "shares"),
    [
        ("Deployment", "Deployment", True),
        ("Deployment", "Key", False),
        ("Key", "Deployment", False),
    ],
)
def test_keys_share_cached_prompts_only_if_every_deployment_says_so(
    a: CacheSharing, b: CacheSharing, *, shares: bool
) -> None:
    model_deployment, two = (
        deployment(name, "fast").model_copy(
            update={"spec": routing_as(name, Routing(cache_sharing=kind)).spec}
        )
        for name, kind in (("a", a), ("b", b))
    )
    loose, strict = Routing(cache_sharing="Deployment"), Routing()
    for routing, expected in ((None, shares), (loose, shares), (strict, False)):
        both = tuple(Backend(deployment=name) for name in ("a", "b"))
        table = build_table(seen(model_deployment, two, routed(backends=both, routing=routing)), {})
        assert table.models["x"].shares_cache is expected
    assert not build_table(seen(deployment("a", "fast"), two), {}).models["a"].shares_cache


def test_rules_and_fallbacks() -> None:
    match = HeaderMatch(name="X-Team", value="res\xe9arch")
    rule = RouteRule(headers=(match, HeaderMatch(name="beta")), backends=(Backend(deployment="c"),))
    objects = (deployment("b"), deployment("c"), target("b-0", "b"), target("c-0", "c", port=2))
    model = build_table(seen(*objects, routed(rules=(rule,), fallbacks=("gone", "c"))), ()).models[
        "x"
    ]
    [header_rule] = model.rules
    assert header_rule.headers == ((b"x-team", "res\xe9arch".encode()), (b"beta", None))
    assert [t.replica for backend in header_rule.backends for t in backend.leased] == ["c-0"]
    assert [backend.deployments for backend in model.fallbacks] == [("gone",), ("c",)]
    assert model.ready() == 2
    assert "gone does not exist" in model.reason
    assert "gone does not exist" in header_rule.reason
    assert "ModelDeployment b" not in header_rule.reason


def test_requests_for_macs_that_sleep_wait_and_count() -> None:
    asleep = Condition(type="Available", status=ConditionStatus.FALSE, reason="Asleep")
    failed = Condition(type="Available", status=ConditionStatus.FALSE, reason="CrashLooping")
    for condition, wakes in ((asleep, "b"), (failed, "")):
        inputs = seen(
            deployment("b"), statuses={"b": ModelDeploymentStatus(conditions=(condition,))}
        )
        inputs = replace(inputs, seen_serving=frozenset({"b"}))
        choice = choose(build_table(inputs, ()), RoutingQuery("b", 0.5), EndpointHealth())
        assert isinstance(choice, NoReadyEndpoint)
        assert choice.wakes == wakes


def test_a_backend_at_zero_is_woken_though_its_fallback_answers() -> None:
    sleeping = deployment("b")
    autoscaling = Autoscaling(min_replicas=0, max_replicas=2)
    sleeping = sleeping.model_copy(
        update={"spec": sleeping.spec.model_copy(update={"autoscaling": autoscaling})}
    )
    objects = (sleeping, deployment("c"), routed(fallbacks=("c",)))
    awake = target("c-0", "c")
    choice = choose(
        build_table(seen(*objects, awake), ()), RoutingQuery("x", 0.5), EndpointHealth()
    )
    assert choice == ChosenEndpoint(endpoint=awake, wakes="b")
    both = build_table(seen(*objects, awake, target("b-0", "b", port=2)), ())
    choice = choose(
        both, RoutingQuery("x", 0.5, frozenset({target("b-0", "b", port=2)})), EndpointHealth()
    )
    assert choice == ChosenEndpoint(endpoint=awake), "it is awake; this request only failed there"
    choice = choose(build_table(seen(*objects), ()), RoutingQuery("x", 0.5), EndpointHealth())
    assert isinstance(choice, NoReadyEndpoint)
    assert choice.wakes == "b"


def test_what_an_endpoint_says_of_its_mac() -> None:
    made = endpoint("a-0", "a", "http://10.0.0.5:4100")
    spec = made.spec.model_copy(update={"concurrency": 16, "site": "x"})
    for given, expected in ((made, (4, "")), (made.model_copy(update={"spec": spec}), (16, "x"))):
        engine_endpoint = endpoint_of(given, 1)
        assert engine_endpoint is not None
        assert (engine_endpoint.concurrency, engine_endpoint.site) == expected


def test_nodes_labels_win_over_what_endpoints_say_of_their_site() -> None:
    here = replace(target("a-0", "a"), site="here", node="mac-0")
    there = replace(target("a-1", "a", port=2), site="there", node="mac-1")
    for sites, near in (({}, ["a-0"]), ({"mac-0": "there", "mac-1": "here"}, ["a-1"])):
        known = replace(seen(deployment("a"), here, there), sites=sites)
        [arm] = build_table(known, (), site="here").models["a"].backends[0].subsets
        assert [t.replica for t in arm.pools[0].endpoints] == near
        assert len(arm.pools) == 2


def test_an_adapter_is_a_model_of_the_engines_that_have_it() -> None:
    """Check a rollout: an engine without the adapter would answer as the model alone."""
    plain = deployment("a", "fast")
    model = ModelSource(path="/models/m", adapters=(NamedAdapter(name="law", path="law"),))
    adapted = plain.model_copy(update={"spec": plain.spec.model_copy(update={"model": model})})
    old = target("a-0", "a")
    new = replace(target("a-1", "a"), names=("a", "fast", "a:law", "fast:law"))
    table = build_table(seen(adapted, old, new), ())
    assert {name: serving(table, name) for name in table.models} == {
        "a": ["a-0", "a-1"],
        "fast": ["a-0", "a-1"],
        "a:law": ["a-1"],
        "fast:law": ["a-1"],
    }
    assert {name: one.parent for name, one in table.models.items()} == {
        "a": "",
        "fast": "",
        "a:law": "a",
        "fast:law": "a",
    }
    assert serving(build_table(seen(adapted, old), ()), "a:law") == []


def test_endpoints_have_the_checks_of_their_deployment_and_external_ones_those_of_the_route() -> (
    None
):
    own = ModelDeployment.model_validate_json(
        '{"metadata": {"name": "a"}, "spec": {"model": {"path": "m"}, "routing": {"healthCheck": '
        '{"interval": "2s", "timeout": "500ms", "unhealthyThreshold": 1}}}}'
    )
    outside = ModelRoute.model_validate_json(
        '{"metadata": {"name": "r"}, "spec": {"model": "fast", "backends": [{"deployment": "a"}], "fallbacks": ["cloud"], '
        '"external": [{"name": "cloud", "url": "http://127.0.0.1:1/v1", "model": "m"}], '
        '"routing": {"healthCheck": {"interval": "5m"}}}}'
    )
    inputs = TableInputs(
        deployments={"a": own},
        statuses={},
        routes={"r": outside},
        leased={"a-0": target("a-0", "a")},
    )
    model = build_table(inputs, ()).models["fast"]
    (engine,), (cloud,) = model.backends[0].leased, model.fallbacks[0].leased
    assert engine.checks == CheckPolicy(interval_s=2.0, timeout_s=0.5, failures=1)
    assert cloud.checks == CheckPolicy(interval_s=300.0)


def test_a_size_tier_of_ones_own_and_the_priority_of_a_mac_count() -> None:
    """The strategy HardwareAware uses what the deployment declares, and what its status says of the pools."""
    hardware = EndpointHardware(chip="Apple M4 Pro", gpu_cores=20, memory_bytes=48 << 30)
    raw = replace(
        target("a-0", "a"), hardware=hardware, parameters=70 * 10**9, is_fit=False, points=57.0
    )
    own = Placement(
        tier=SizeMinimum(min_gpu_cores=20, min_memory="48Gi", preferred_nodes=(raw.node,))
    )
    declared = deployment("a")
    spec = declared.spec.model_copy(update={"placement": own})
    declared = declared.model_copy(update={"spec": spec})
    status = ModelDeploymentStatus(node_priorities={raw.node: 50})
    inputs = TableInputs(
        deployments={"a": declared}, statuses={"a": status}, routes={}, leased={"a-0": raw}
    )
    builder = TableBuilder(inputs, ())

    def found() -> tuple[bool, float]:
        (one,) = builder.table().models["a"].backends[0].leased
        return one.is_fit, one.points

    assert found() == (True, 67.0)
    # The pool's priority changes: only the status of the deployment does.
    inputs = replace(inputs, statuses={"a": ModelDeploymentStatus()})
    builder.change(inputs, statuses=["a"])
    assert found() == (True, 57.0)
