"""`fleetctl import mesh` on the literal files of mlx-stack's issue 31: every field is used, reported or refused."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fleetctl.verbs.import_ import importing
from manifests.load import load_objects
from manifests.validate import StoreNames, validate
from schemas.deployment import ModelDeployment
from schemas.pools import NodePool
from schemas.routing import HealthCheck
from schemas.wire.discovery import SERVICE, Announcement, parse, render
from tests.seeds import literals

REMOTE = literals.MESH_DISCOVERY.text
WHOLE = literals.MESH_CONFIGURATION.text


def run(text: str, *words: str) -> Result:
    return CliRunner().invoke(importing, ["mesh", "-", "--name", "mesh", *words], input=text)


def pools(text: str, tmp_path: Path) -> dict[str, NodePool]:
    """Load and validate the manifests; return the pools by name."""
    path = tmp_path / "made.yaml"
    path.write_text(text)
    loaded = load_objects([str(path)])
    assert validate(loaded, StoreNames()) == []
    return {one.obj.metadata.name: one.obj for one in loaded if isinstance(one.obj, NodePool)}


def deployments(tmp_path: Path) -> list[ModelDeployment]:
    loaded = load_objects([str(tmp_path / "made.yaml")])
    return [one.obj for one in loaded if isinstance(one.obj, ModelDeployment)]


def test_the_configuration_of_the_issue(tmp_path: Path) -> None:
    done = run(WHOLE, "--model", "mlx-community/Qwen3-32B-4bit")
    assert done.exit_code == 0, done.output
    found = pools(done.output, tmp_path)
    assert list(found) == ["mesh"]
    assert found["mesh"].spec.selector is not None
    (deployment,) = deployments(tmp_path)
    routing = deployment.spec.routing
    assert routing.strategy == "Scored"
    weights = routing.weights
    assert (weights.model_loaded, weights.memory_headroom) == (40, 20)
    assert (weights.queue_depth, weights.prefix_affinity) == (30, 10)
    assert routing.health_check == HealthCheck(interval="10s", timeout="5s", unhealthy_threshold=3)
    assert deployment.spec.placement.pools == ("mesh",)
    # All other fields are reported by name, with their values.
    for line, text in (
        (2, "enabled: true"),
        (3, "role: auto"),
        (5, "discovery[0].type: mdns"),
        (6, "discovery[1].type: tailscale"),
        (19, "coordinator.port: 4000"),
        (20, "coordinator.failover_timeout: 5"),
    ):
        assert f"line {line}: {text}" in done.output, done.output


def test_static_hosts_beside_automatic_discovery(tmp_path: Path) -> None:
    done = run(REMOTE, "--name", "home", "--model", "org/m")
    assert done.exit_code == 0, done.output
    found = pools(done.output, tmp_path)
    assert found["home"].spec.selector is not None
    assert found["home-static"].spec.nodes == ("mac-mini-3",)
    assert "discovery[2].nodes[0].port: 4000" in done.output
    (deployment,) = deployments(tmp_path)
    assert deployment.spec.placement.pools == ("home", "home-static")


def test_static_hosts_alone_are_the_pool(tmp_path: Path) -> None:
    text = "mesh:\n  discovery:\n    - type: static\n      nodes: [{host: a.local, port: 4000}, b.local:4000]\n"
    found = pools(run(text).output, tmp_path)
    assert {name: one.spec.nodes for name, one in found.items()} == {"mesh": ("a", "b")}


def test_kinds_may_be_words(tmp_path: Path) -> None:
    done = run("mesh: {discovery: [mdns, tailscale]}")
    assert done.exit_code == 0, done.output
    assert list(pools(done.output, tmp_path)) == ["mesh"]
    assert "discovery[1]: tailscale" in done.output


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "mesh: {discovery: [{type: nats}]}",
            "mesh.discovery[0].type: has the unknown value 'nats'",
        ),
        (
            "mesh: {discovery: [mdns, bonjour]}",
            "mesh.discovery[1]: has the unknown value 'bonjour'",
        ),
        ("mesh: {discovery: [{type: static}]}", "is static and lists no Macs"),
        (
            "mesh: {role: auto, health_check: {interval: 0.2}}",
            "mesh.health_check.interval: is 0.2 s; give 1 to 3600 s",
        ),
        ("mesh: {discovery: [{type: static, nodes: [{host: 10.0.0.3}]}]}", "Give --nodes"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(text: str, error: str) -> None:
    done = run(text)
    assert done.exit_code == 1
    assert error in done.output


def test_weights_of_another_strategy_are_reported() -> None:
    done = run("mesh: {routing: {strategy: random, weights: {queue_depth: 0.3}}}")
    assert "routing.weights.queue_depth: 0.3: strategy Random has no weights" in done.output


def test_the_advertisement_of_the_mesh() -> None:
    """The mesh tells its models and memory to any machine of the network; the fleet tells how to reach it."""
    theirs = literals.MESH_ADVERTISEMENT.text
    assert "txt: version=0.3.0, tiers=standard,fast" in theirs
    ours = Announcement(role="gateway", name="mac-mini-1", fleet="0" * 32)
    assert set(render(ours)) == {"v", "role", "name", "fleet"}
    assert parse(render(ours)) == ours
    assert SERVICE == "_mlx-fleet._tcp.local."
