"""The verb `fleetctl import`: conversion of other tools' configuration to manifests and comments."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetctl.convert import manifest_drafts, mesh_import, ring_import, serving_import
from fleetctl.convert.foreign_config import ForeignConfig, OmissionReason, read_documents
from fleetctl.convert.node_names import NodeNames
from fleetctl.verbs.import_ import importing
from manifests.errors import ManifestErrors
from manifests.load import LoadedObject, load_objects
from manifests.validate import StoreNames, validate
from schemas.deployment import ModelDeployment
from schemas.node import FabricInterface, NodeFabric
from schemas.placement import SizeMinimum
from schemas.pools import NodePool
from schemas.shardgroup import ShardGroup
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.reconciler_agents import node_status, put_node
from tests.support.sampling import samples

EXAMPLES = Path(__file__).parents[3] / "examples" / "import"


def run(*words: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(importing, list(words), input=stdin)


def applied(text: str, tmp_path: Path) -> dict[str, LoadedObject]:
    """Load and validate the manifests; return the objects by key."""
    path = tmp_path / "made.yaml"
    path.write_text(text)
    loaded = load_objects([str(path)])
    assert validate(loaded, StoreNames()) == []
    return {str(item.key): item for item in loaded}


def deployment(found: dict[str, LoadedObject], name: str) -> ModelDeployment:
    obj = found[f"ModelDeployment/{name}"].obj
    assert isinstance(obj, ModelDeployment)
    return obj


def test_mesh_of_mlx_stack(tmp_path: Path) -> None:
    done = run("mesh", str(EXAMPLES / "mesh.yaml"))
    assert done.exit_code == 0, done.output
    found = applied(done.output, tmp_path)
    pool = found["NodePool/mesh"].obj
    assert isinstance(pool, NodePool)
    assert pool.spec.nodes == ("studio", "mini-1", "mini-2")
    standard = deployment(found, "qwen3-32b")
    assert standard.spec.served_names == ("standard",)
    assert standard.spec.model.label == "mlx-community/Qwen3-32B-4bit@main"
    weights = standard.spec.routing.weights
    assert (weights.model_loaded, weights.memory_headroom) == (40, 20)
    assert (weights.queue_depth, weights.prefix_affinity) == (30, 10)
    checks = standard.spec.routing.health_check
    assert checks is not None
    assert (checks.interval, checks.timeout, checks.unhealthy_threshold) == ("10s", "5s", 3)
    assert deployment(found, "qwen3-8b").spec.placement.pools == ("mesh",)
    for text in ("# line 3: role: auto: ", "failover_timeout: 5s"):
        assert text in done.output


def test_a_mesh_with_discovery_selects_every_mac() -> None:
    text = "mesh: {discovery: {type: mdns}, routing: {strategy: round_robin}}"
    made = mesh_import.convert(text, "m.yaml", name="home", nodes=NodeNames(), models=())
    assert (
        made
        == """\
# From m.yaml of mlx-stack. Settings without a counterpart:
# line 1: discovery.type: mdns: agents connect to the fleet's etcd (--etcd), over any network that reaches it
# every Mac whose agent joins; give --nodes to choose
# The file names no model. Add this below spec of each ModelDeployment, or name models with --model
#   routing:
#     strategy: RoundRobin
apiVersion: fleet/v1alpha1
kind: NodePool
metadata:
  name: home
spec:
  selector: {}
"""
    )


def test_cluster_of_mlx_serving(tmp_path: Path) -> None:
    done = run("serving", str(EXAMPLES / "cluster.yaml"), "--model", "mlx-community/Qwen3-8B-4bit")
    assert done.exit_code == 0, done.output
    found = applied(done.output, tmp_path)
    priorities = {
        name: item.obj.spec.priority
        for name, item in found.items()
        if isinstance(item.obj, NodePool) and item.obj.spec.nodes
    }
    assert priorities == {
        "NodePool/workers-100": 100,
        "NodePool/workers-80": 80,
        "NodePool/workers-50": 50,
    }
    tier = deployment(found, "qwen3-8b-4bit").spec.placement.tier
    assert isinstance(tier, SizeMinimum)
    assert (tier.min_gpu_cores, tier.min_memory) == (15, "16Gi")
    assert found["Node/mac-studio-1"].obj.metadata.labels == {
        "mlx-serving/production": "true",
        "mlx-serving/high-memory": "true",
    }
    routing = deployment(found, "qwen3-8b-4bit").spec.routing
    assert routing.strategy == "HardwareAware"
    assert (routing.sessions.enabled, routing.sessions.ttl) == (True, "5m")
    assert "NATS_PASSWORD" not in done.output
    for text in (
        "# nats: etcd replaces it",
        "requests_per_minute: 100",
    ):
        assert text in done.output


def test_camel_case_of_release_1_2_is_read() -> None:
    text = """
mode: both
workers: {static: [{ip: 192.168.1.100, port: 8080, name: mac-studio-1, priority: 100}]}
load_balancing: {strategy: smart, stickySession: false}
"""
    made = serving_import.convert(text, "cluster.yaml", nodes=NodeNames(), models=("a/b",))
    assert "strategy: HardwareAware" in made
    assert "enabled: false" in made
    assert "- mac-studio-1" in made


def test_env_of_the_ring(tmp_path: Path) -> None:
    done = run("ring", str(EXAMPLES / "ring.env"), "--nodes", "mini-1,mini-2")
    assert done.exit_code == 0, done.output
    found = applied(done.output, tmp_path)
    group = found["ShardGroup/ring"].obj
    assert isinstance(group, ShardGroup)
    assert [(m.node, m.addresses) for m in group.spec.members] == [
        ("mini-1", ("192.168.5.1",)),
        ("mini-2", ("192.168.5.2",)),
    ]
    assert (group.spec.backend, group.spec.parallelism) == ("ring", "Tensor")
    model = deployment(found, "qwen3-14b-4bit").spec
    assert (model.model.label, model.sharding) == ("mlx-community/Qwen3-14B-4bit@main", "ring")
    assert (model.context_length, model.routing.timeouts.request) == (4096, "2m")
    assert model.sampling is not None
    assert model.sampling.max_tokens == 50
    assert "line 5: API_PORT: 8100: " in done.output


def test_addresses_need_node_names() -> None:
    done = run("ring", str(EXAMPLES / "ring.env"))
    assert done.exit_code == 1
    assert (
        "ring.env:4:1: API_HOST: does not name the node of 192.168.5.1. Give --nodes" in done.output
    )


async def test_addresses_are_those_that_agents_report(fleet: MemoryFleet, tmp_path: Path) -> None:
    """No --nodes: the fleet knows the Macs of the ring's cable, of LocalAI's ports, and of static workers."""
    cable = (FabricInterface(name="bridge0", address="192.168.5.2"),)
    reported = {
        "studio": node_status("studio").model_copy(update={"address": "192.168.5.1"}),
        "mini": node_status("mini").model_copy(
            update={"address": "192.168.1.11", "fabric": NodeFabric(interfaces=cable)}
        ),
        # Two parts of one machine: their address names neither.
        "part-1": node_status("part-1"),
        "part-2": node_status("part-2"),
    }
    await fleet.store.commit([], [put_node(name, status) for name, status in reported.items()])

    async def nodes_of(kind: str, *words: str, text: str) -> list[str]:
        done = await fleet.ctl("import", kind, "-", *words, stdin=text.encode())
        assert done.code == 0, done.err
        return re.findall(r"- (?:node: )?(studio|mini|other)$", done.out, re.MULTILINE)

    ring = (EXAMPLES / "ring.env").read_text()
    assert await nodes_of("ring", text=ring) == ["studio", "mini"]
    named = ring.replace("mini2@192.168.5.2", "mini2@other.local")
    assert await nodes_of("ring", text=named) == ["studio", "mini"]
    hosts = '["192.168.5.1:5555", "192.168.1.11:5555"]'
    assert await nodes_of("hostfile", text=hosts) == ["studio", "mini"]
    (tmp_path / "hosts.json").write_text(hosts)
    model = (EXAMPLES / "localai.yaml").read_text()
    words = ("--hostfile", str(tmp_path / "hosts.json"))
    assert await nodes_of("localai", *words, text=model) == ["studio", "mini"]
    static = "workers: {static: [{ip: 192.168.1.11, name: other, priority: 1}, {ip: 192.168.5.1}]}"
    assert await nodes_of("serving", text=static) == ["mini", "studio"]
    mesh = "mesh: {discovery: {type: static, nodes: [{host: 192.168.5.1}, {host: other.local}]}}"
    assert await nodes_of("mesh", text=mesh) == ["studio", "other"]
    refused = await fleet.ctl("import", "hostfile", "-", stdin=b'["127.0.0.1:1", "10.0.0.9:1"]')
    assert "does not name the node of rank 0" in refused.err
    fleet.vanish()
    away = await fleet.ctl("import", "ring", "-", stdin=ring.encode())
    assert "a fleet whose agents report the address" in away.err


def test_a_model_of_localai_with_its_host_file(tmp_path: Path) -> None:
    done = run("localai", str(EXAMPLES / "localai.yaml"), "--nodes", "mac-a,mac-b")
    assert done.exit_code == 0, done.output
    found = applied(done.output, tmp_path)
    group = found["ShardGroup/llama-distributed-group"].obj
    assert isinstance(group, ShardGroup)
    assert [m.node for m in group.spec.members] == ["mac-a", "mac-b"]
    assert (group.spec.backend, group.spec.parallelism) == ("ring", "Auto")
    model = deployment(found, "llama-distributed").spec
    assert (model.context_length, model.sharding) == (8192, "llama-distributed-group")
    assert "options[2]: trust_remote_code:true: the fleet never runs code of a model" in done.output


def test_models_of_localai_without_a_host_file_run_on_one_mac(tmp_path: Path) -> None:
    text = """
- {name: Llama_1B, backend: mlx, parameters: {model: mlx-community/Llama-3.2-1B-Instruct-4bit}}
- {name: coder, backend: mlx-distributed, parameters: {model: a/b}, draft_model: a/c, n_draft: 4}
"""
    done = run("localai", "-", stdin=text)
    assert done.exit_code == 0, done.output
    found = applied(done.output, tmp_path)
    assert deployment(found, "llama-1b").spec.served_names == ("Llama_1B",)
    coder = deployment(found, "coder").spec
    assert coder.sharding == "Never"
    assert coder.model.draft is not None
    assert (coder.model.draft.path, coder.model.draft.tokens) == ("a/c", 4)


@pytest.mark.parametrize(
    ("verb", "text", "message"),
    [
        pytest.param(
            "localai",
            "name: a\nbackend: llama-cpp\nparameters: {model: a.gguf}",
            "standard input:2:10: backend: is llama-cpp, which does not use models in MLX format",
            id="not-mlx",
        ),
        pytest.param(
            "localai",
            "name: a\nbackend: mlx\nparameters: {model: a}\ncontext_size: 3",
            "standard input:4:15: context_size: results in an invalid ModelDeployment: spec.contextLength: ",
            id="a-value-that-the-fleet-refuses",
        ),
        pytest.param(
            "localai",
            "name: a\nbackend: mlx-distributed\nparameters: {model: a}\noptions: ['hostfile:none.json']",
            "none.json: does not exist",
            id="no-host-file",
        ),
        pytest.param(
            "mesh",
            "mesh:\n  routing: {strategy: fastest}",
            "mesh.routing.strategy: has the unknown value 'fastest'. Known values are: scored",
            id="unknown-word",
        ),
        pytest.param(
            "mesh",
            "mesh:\n  discovery: {type: static}",
            "is static and lists no Macs. Add below it: nodes: ",
            id="static-without-macs",
        ),
        pytest.param(
            "serving",
            "cluster: {workers: {static: [{name: a, priority: high}]}}",
            'cluster.workers.static[0].priority: expected a number of 0 or more, got "high" (a string)',
            id="no-number",
        ),
        pytest.param("serving", "mode: dual", "so there is nothing to declare", id="nothing"),
        pytest.param("ring", "API_HOST", "standard input: is not an .env file", id="no-env"),
        pytest.param(
            "ring",
            "API_HOST=a.local\nNUM",
            "standard input:2:1: expected NAME=VALUE",
            id="half-an-env",
        ),
        pytest.param("ring", "LOG_LEVEL=INFO", "sets no variable of mlx_dist", id="another-env"),
        pytest.param("localai", "- a\n- b", "[1]: expected a model: name", id="texts"),
        pytest.param("localai", "[]", "names no models", id="no-models"),
        pytest.param(
            "ring",
            "API_HOST=a.local\nWORKER_HOSTS=b.local\nNUM_DEVICES=3",
            "NUM_DEVICES: is 3, but API_HOST and WORKER_HOSTS name 2 Macs",
            id="numbers-disagree",
        ),
        pytest.param(
            "ring",
            "API_HOST=a.local\nWORKER_HOSTS=b.local\nDISTRIBUTED_BACKEND=nccl",
            "DISTRIBUTED_BACKEND: has the unknown value 'nccl'",
            id="no-backend-of-a-mac",
        ),
    ],
)
def test_refusals_name_the_line(verb: str, text: str, message: str) -> None:
    done = run(verb, "-", stdin=text)
    assert done.exit_code == 1
    assert done.output.startswith("error: nothing was imported:\n")
    assert message in done.output


@pytest.mark.parametrize("verb", ["mesh", "serving", "localai"])
@pytest.mark.parametrize(
    "text", ["HF_TOKEN=hf_SECRET12\nAPI_KEY=sk-live-999\n", "# a\nA=sk-1\n\nB='hf_SECRET12' # c\n"]
)
def test_a_file_of_secrets_is_refused_and_not_shown(verb: str, text: str) -> None:
    done = run(verb, "-", stdin=text)
    assert done.exit_code == 1
    assert "expected YAML with fields, got one bare value" in done.output
    assert "did you mean import ring?" in done.output
    assert "SECRET" not in done.output
    assert "sk-" not in done.output


@pytest.mark.parametrize(
    "text",
    ["mesh: {password: hunter2, url: 'https://x'}", "role: admin", "- discovery", "mesh: words"],
)
def test_a_file_without_mesh_fields_is_refused(text: str) -> None:
    done = run("mesh", "-", stdin=text)
    assert done.exit_code == 1
    assert "is not mesh YAML" in done.output
    assert "hunter2" not in done.output


def test_yaml_instead_of_an_env_file_is_one_problem() -> None:
    done = run("ring", str(EXAMPLES / "mesh.yaml"))
    assert done.exit_code == 1
    assert len(done.output.splitlines()) == 2
    assert "mesh.yaml: is not an .env file" in done.output
    assert "Did you mean import mesh" in done.output


def test_env_is_read_as_python_dotenv_reads_it() -> None:
    text = """
export API_HOST='mini-1.local'  # the first
WORKER_HOSTS="mini-2.local,mini-3.local"
MODEL_REPO=org/Model-4bit # the model
NUM_DEVICES=3
DISTRIBUTED_BACKEND=jaccl
KV_CACHE_MAX_SIZE=1024
"""
    made = ring_import.convert(text, ".env", name="minis", nodes=NodeNames())
    for text in ("- node: mini-3", "repo: org/Model-4bit", "backend: jaccl", "window: 1024"):
        assert text in made


def test_secrets_are_listed_but_not_shown() -> None:
    text = "a: {hub_token: hf_123, url: 'https://me:pw@host/x', max_tokens: 5, keyring: k, env: ['HF_TOKEN=x1']}"
    [document] = read_documents(text, "f.yaml")
    left = ForeignConfig(document).omission_lines({"a": OmissionReason(text="so")}, "else")
    assert left == [
        "so:",
        "  line 1: a.hub_token: (a secret, not copied)",
        "  line 1: a.url: https://host/x",
        "  line 1: a.max_tokens: 5",
        "  line 1: a.keyring: k",
        "  line 1: a.env[0]: (a secret, not copied)",
    ]


@settings(max_examples=samples(60), deadline=None)
@given(
    parts=st.dictionaries(
        st.sampled_from(["modelLoaded", "memoryHeadroom", "queueDepth", "prefixAffinity"]),
        st.integers(0, 1000).map(lambda number: number / 1000),
        min_size=1,
    ).filter(lambda parts: any(parts.values()))
)
def test_weights_keep_their_proportions(parts: dict[str, float]) -> None:
    [document] = read_documents("\n".join(f"{name}: {part}" for name, part in parts.items()), "f")
    found = manifest_drafts.scale_weights(
        ForeignConfig(document), {name: (name,) for name in parts}
    )
    assert found is not None
    whole = {name: int(str(weight)) for name, weight in found.items()}
    assert all(0 <= weight <= 1000 for weight in whole.values())
    most = max(parts, key=lambda name: parts[name])
    for name, part in parts.items():
        assert whole[name] / whole[most] == pytest.approx(part / parts[most], abs=0.001)


def test_every_value_is_converted_or_listed() -> None:
    """Every value is in the manifests, or in a comment with its line."""
    path = EXAMPLES / "cluster.yaml"
    made = run("serving", str(path), "--model", "a/b").output
    lines = path.read_text().splitlines()
    # One comment covers the whole nats section.
    silent = range(lines.index("  nats:"), lines.index("  workers:"))
    for number, line in enumerate(lines):
        word, colon, value = line.strip().removeprefix("- ").partition(": ")
        if number in silent or not colon or line.lstrip().startswith("#"):
            continue
        value = value.strip("\"'[]").split('"')[0]
        assert f"line {number + 1}: " in made or value in made or word in _RENAMED, line


# These values have other names in the fleet, or come from the agents' reports.
_RENAMED = {"strategy", "session_ttl_ms", "sticky_sessions", "ip", "priority", "min_memory_gb"}


def test_an_invalid_file_writes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "made.yaml"
    assert run("mesh", "-", "-o", str(target), stdin="mesh: {role: [1]}").exit_code == 0
    target.unlink()
    assert (
        run("mesh", "-", "-o", str(target), stdin="mesh: {routing: {strategy: x}}").exit_code == 1
    )
    assert not target.exists()
    with pytest.raises(ManifestErrors, match="names 2 Macs, but --nodes names 1"):
        ring_import.convert(
            "API_HOST=a.local\nWORKER_HOSTS=b.local",
            ".env",
            name="r",
            nodes=NodeNames(given=("x",)),
        )
