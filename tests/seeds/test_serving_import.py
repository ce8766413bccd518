"""`fleetctl import serving` on the literal files of mlx-serving's PRD: imported whole, or refused by name."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fleetctl.verbs.import_ import importing
from manifests.load import load_objects
from manifests.validate import StoreNames, validate
from schemas.deployment import ModelDeployment
from schemas.placement import Placement, SizeMinimum
from schemas.pools import NodePool, NodePoolSpec
from tests.seeds import literals

PLAIN = literals.SERVING_STATIC.text
SCENARIO_1 = literals.SERVING_SCENARIO_1.text
SCENARIO_2 = literals.SERVING_SCENARIO_2.text
SCENARIO_3 = literals.SERVING_SCENARIO_3.text


def run(text: str, *words: str) -> Result:
    return CliRunner().invoke(importing, ["serving", "-", *words], input=text)


def made(done: Result, folder: Path) -> tuple[dict[str, NodePoolSpec], list[ModelDeployment]]:
    """Load and validate the manifests; return the pools by name, and the deployments."""
    assert done.exit_code == 0, done.output
    path = folder / "made.yaml"
    path.write_text(done.output)
    loaded = load_objects([str(path)])
    assert validate(loaded, StoreNames()) == []
    objects = [one.obj for one in loaded]
    pools = {one.metadata.name: one.spec for one in objects if isinstance(one, NodePool)}
    return pools, [one for one in objects if isinstance(one, ModelDeployment)]


def test_workers_as_a_plain_list(tmp_path: Path) -> None:
    done = run(PLAIN, "--model", "mlx-community/Qwen3-8B-4bit")
    pools, (deployment,) = made(done, tmp_path)
    assert {name: (one.priority, one.nodes) for name, one in pools.items()} == {
        "workers-100": (100, ("mac-studio-1",)),
        "workers-80": (80, ("macbook-pro-1",)),
        "workers-50": (50, ("mac-mini-1",)),
    }
    # Its discovery adds Macs that the file does not list, and no tier is for 8B.
    assert deployment.spec.placement == Placement()
    assert deployment.spec.routing.strategy == "HardwareAware"
    for text in (
        "workers[0].ip: 192.168.1.101",
        "workers[2].port: 8080",
        "controller.dashboard_port: 8081",
        "discovery.offline_timeout_ms: 15000",
        'models.tier_preferences["30B+"].min_gpu_cores: 30',
        "no tier of the file is for 8B",
    ):
        assert text in done.output, text
    closed = PLAIN.replace("enabled: true  # Auto", "enabled: false  # Auto")
    _, (deployment,) = made(run(closed, "--model", "a/Qwen3-27B"), tmp_path)
    assert deployment.spec.placement.pools == ("workers-100", "workers-80", "workers-50")
    assert deployment.spec.placement.tier == SizeMinimum(
        min_gpu_cores=20,
        min_memory="32Gi",
        preferred_chips=("Apple M3 Pro", "Apple M3 Max", "Apple M4 Pro", "Apple M4 Max"),
    )


@pytest.mark.parametrize(
    ("text", "strategy", "reported"),
    [
        (SCENARIO_1, "LeastLoaded", ("mode: dual", "discovery.method: mdns")),
        (
            SCENARIO_2,
            "HardwareAware",
            (
                "mode: controller",
                "discovery.require_authentication: true",
                "monitoring.prometheus_port: 9090",
            ),
        ),
    ],
)
def test_scenarios_of_discovery_alone(
    tmp_path: Path, text: str, strategy: str, reported: tuple[str, ...]
) -> None:
    refused = run(text)
    assert refused.exit_code == 1
    assert "names no workers and no models" in refused.output
    assert "fleetctl join" in refused.output
    done = run(text, "--model", "mlx-community/Qwen3-8B-4bit")
    pools, (deployment,) = made(done, tmp_path)
    assert (pools, deployment.spec.routing.strategy) == ({}, strategy)
    for line in (*reported, "nats: etcd replaces it"):
        assert line in done.output, line


def test_the_scenario_of_preferred_workers(tmp_path: Path) -> None:
    sizes = ("Qwen3-30B-A3B-4bit", "Mixtral-8x7B", "Llama-3.2-1B", "Qwen3-8B", "phi-mini-4bit")
    done = run(SCENARIO_3, *(word for size in sizes for word in ("--model", f"a/{size}")))
    pools, deployments = made(done, tmp_path)
    assert pools == {}
    heavy = SizeMinimum(preferred_nodes=("mac-studio-2", "mac-studio-3"))
    light = SizeMinimum(preferred_nodes=("mac-studio-1",))
    tiers = [one.spec.placement.tier for one in deployments]
    assert tiers == [heavy, heavy, light, "Auto", "Auto"]
    assert all(one.spec.placement.pools == () for one in deployments)


def test_preferred_workers_follow_the_nodes_of_workers(tmp_path: Path) -> None:
    text = """
workers: [{ip: 10.0.0.1, name: one}, {ip: 10.0.0.2}]
models: {tier_preferences: {'3-7B': {min_gpu_cores: 60, preferred_workers: [one, 10.0.0.2]}}}
"""
    done = run(text, "--nodes", "studio-1,studio-2", "--model", "/models/Qwen3-4B")
    _, (deployment,) = made(done, tmp_path)
    assert deployment.spec.placement.tier == SizeMinimum(
        min_gpu_cores=60, preferred_nodes=("studio-1", "studio-2")
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("models: {tier_preferences: {'<3B': 8}}", "expected a mapping"),
        ("models: {tier_preferences: {'<3B': {colour: red}}}", "prefers no Macs"),
        ("models: {tier_preferences: {'<3B': {preferred_chips: [M9]}}}", "no chip that Apple sold"),
        ("models: {tier_preferences: {'<3B': {preferred_workers: [10.0.0.9]}}}", "names no node"),
        ("models: {tier_preferences: {large: {min_gpu_cores: 8}}}", "names no size of models"),
        (
            "workers: [{name: a, priority: 101}]",
            "workers[0].priority: results in an invalid NodePool",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(text: str, error: str) -> None:
    done = run(text, "--model", "a/m-1B")
    assert done.exit_code == 1, done.output
    assert error in done.output


def test_the_whole_configuration(tmp_path: Path) -> None:
    text = literals.SERVING_CONFIGURATION.text
    done = run(text, "--model", "mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit")
    pools, (deployment,) = made(done, tmp_path)
    tier = deployment.spec.placement.tier
    assert isinstance(tier, SizeMinimum)
    assert (tier.min_gpu_cores, tier.min_memory) == (30, "64Gi")
    assert tier.preferred_chips == (
        *("Apple M3 Max", "Apple M3 Ultra", "Apple M4 Max", "Apple M5 Max"),
    )
    assert "M4 Ultra is left out: no Mac has this chip" in done.output
    assert (pools["model-cache"].model_disk_limit, pools["model-cache"].nodes) == ("50G", ())
    sessions = deployment.spec.routing.sessions
    assert (sessions.enabled, sessions.ttl) == (True, "5m")
    # Each value became a field, or is listed with its line.
    for number, line in enumerate(text.splitlines(), 1):
        name, _, value = line.split("#")[0].strip().removeprefix("- ").partition(": ")
        is_listed = any(
            f"line {number}: " in one and name.strip("'") in one for one in done.output.splitlines()
        )
        if value and not is_listed and "nats" not in text.splitlines()[number - 1]:
            kept = (
                *("name", "priority", "tags", "strategy", "sticky_sessions", "session_ttl_ms"),
                *("min_memory_gb", "preferred_chips", "min_gpu_cores", "user", "password"),
                *("server_url", "embedded", "cluster_name", "enabled", "store_dir"),
                "max_cache_gb_per_worker",
            )
            assert name in kept, (number, line)
