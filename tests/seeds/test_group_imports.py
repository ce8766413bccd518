"""`fleetctl import` on the literal host files, variables and model YAML of mlx-jaccl-cluster, LocalAI and the ring server."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fleetctl.verbs.import_ import importing
from manifests.load import load_objects
from manifests.validate import StoreNames, validate
from schemas.deployment import ModelDeployment
from schemas.pools import NodePool
from schemas.shardgroup import ShardGroup
from tests.seeds import literals

HOSTS = literals.JACCL_HOSTS.text
ONE_HOST = '[{"ssh": "mac1.local", "ips": ["192.168.1.14"]}]'
# Its variables with their defaults, as a Makefile sets them.
MAKEFILE = """\
MODEL_DIR   ?=
HOSTFILE    ?= hostfiles/hosts-2node.json
HTTP_HOST   ?= 0.0.0.0
HTTP_PORT   ?= 8080
CTRL_PORT   := 18080
QUEUE_MAX   ?= 8
REQ_TIMEOUT ?= 120
RDMA_ROUNDS ?= 20
.PHONY: server
server: verify
\tMODEL_DIR=$(MODEL_DIR) bash scripts/server.sh

ifdef REMOTE
endif
"""
ENV = """\
MODEL_DIR=~/models_mlx/Qwen3-4B
MODEL_ID=qwen
HOSTFILE=hostfiles/hosts-2node.json
QUEUE_MAX=16
REQ_TIMEOUT=90
CTRL_HOST=192.168.1.14
MLX_METAL_FAST_SYNCH=1
HF_HUB_OFFLINE=1
"""
# All options of LocalAI's page.
RING = """\
name: llama-distributed
backend: mlx-distributed
parameters:
  model: mlx-community/Llama-3.2-1B-Instruct-4bit
options:
  - "hostfile:hosts.json"
  - "distributed_backend:ring"
  - "max_tokens:512"
  - "temp:0.2"
  - "top_p:0.9"
  - "trust_remote_code:true"
"""
QUICK = """\
name: llama-distributed
backend: mlx-distributed
parameters:
  model: mlx-community/Llama-3.2-1B-Instruct-4bit
  temperature: 0.7
  top_k: 40
"""


def run(*words: str, stdin: str | None = None, **env: str) -> Result:
    return CliRunner().invoke(importing, list(words), input=stdin, env=env)


def made(done: Result, folder: Path) -> dict[str, object]:
    """Load and validate the manifests; return the objects by kind."""
    assert done.exit_code == 0, done.output
    path = folder / "made.yaml"
    path.write_text(done.output)
    loaded = load_objects([str(path)])
    assert validate(loaded, StoreNames()) == []
    return {type(one.obj).__name__: one.obj for one in loaded}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hostfiles").mkdir()
    (tmp_path / "hostfiles" / "hosts-2node.json").write_text(HOSTS)
    (tmp_path / "hosts.json").write_text('["192.168.1.10:5555", "192.168.1.11:5555"]')
    (tmp_path / "one.json").write_text(ONE_HOST)
    return tmp_path


def test_a_host_file_with_rdma_is_a_jaccl_group(folder: Path) -> None:
    group = made(run("hostfile", "-", "--name", "minis", stdin=HOSTS), folder)["ShardGroup"]
    assert isinstance(group, ShardGroup)
    assert group.spec.backend == "jaccl"
    assert [member.node for member in group.spec.members] == ["mac1", "mac2"]
    assert group.spec.members[0].rdma == {"mac2": ("rdma_en4",)}
    assert group.spec.members[0].addresses == ("192.168.1.14",)
    without = HOSTS.replace('[null, "rdma_en4"]', "[]").replace('["rdma_en4", null]', "[]")
    group = made(run("hostfile", "-", stdin=without), folder)["ShardGroup"]
    assert isinstance(group, ShardGroup)
    assert group.spec.backend == "ring"


def test_a_host_file_of_one_mac_is_a_pool(folder: Path) -> None:
    done = run("hostfile", "-", "--name", "solo", stdin=ONE_HOST)
    pool = made(done, folder)["NodePool"]
    assert isinstance(pool, NodePool)
    assert pool.spec.nodes == ("mac1",)
    assert "needs no ShardGroup" in done.output
    refused = run("hostfile", "-", stdin='["10.0.0.1:5555"]')
    assert refused.exit_code == 1
    assert "Give --nodes NODE" in refused.output


def test_variables_of_mlx_jaccl_cluster(folder: Path) -> None:
    (folder / "cluster.env").write_text(ENV)
    done = run("jaccl", str(folder / "cluster.env"))
    found = made(done, folder)
    group, deployment = found["ShardGroup"], found["ModelDeployment"]
    assert isinstance(group, ShardGroup)
    assert isinstance(deployment, ModelDeployment)
    assert (group.metadata.name, group.spec.backend) == ("cluster", "jaccl")
    assert group.spec.environment == {"MLX_METAL_FAST_SYNCH": "1"}
    spec = deployment.spec
    assert (spec.model.path, spec.sharding, spec.served_names) == ("Qwen3-4B", "cluster", ("qwen",))
    assert spec.routing.queueing is not None
    assert (spec.routing.queueing.concurrency, spec.routing.queueing.depth) == (1, 16)
    assert spec.routing.timeouts.request == "1m30s"
    assert "line 6: CTRL_HOST: 192.168.1.14: " in done.output
    assert "line 8: HF_HUB_OFFLINE: 1: " in done.output


def test_variables_of_a_makefile(folder: Path) -> None:
    (folder / "Makefile").write_text(MAKEFILE)
    done = run("jaccl", str(folder / "Makefile"), "--model", "/models/Qwen3-4B")
    deployment = made(done, folder)["ModelDeployment"]
    assert isinstance(deployment, ModelDeployment)
    assert deployment.spec.model.path == "/models/Qwen3-4B"
    assert deployment.spec.routing.queueing is not None
    assert deployment.spec.routing.queueing.depth == 8
    assert deployment.spec.routing.timeouts.request == "2m"
    for text in ("HTTP_PORT: 8080", "CTRL_PORT: 18080", "RDMA_ROUNDS: 20"):
        assert text in done.output
    without = run("jaccl", str(folder / "Makefile"))
    assert without.exit_code == 1
    assert "names no model: MODEL_DIR is not set" in without.output


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("MODEL_DIR=$(HOME)/m", "MODEL_DIR: is an expression"),
        ("MODEL_DIR=m\nQUEUE_MAX=many", "QUEUE_MAX: expected a number"),
        ("LOG_LEVEL=info", "sets no variable of mlx-jaccl-cluster"),
        ("MODEL_DIR=m\nHOSTFILE=nowhere.json", "nowhere.json"),
    ],
)
def test_variables_that_cannot_be_converted(folder: Path, text: str, error: str) -> None:
    (folder / "x.env").write_text(text)
    done = run("jaccl", str(folder / "x.env"))
    assert done.exit_code == 1
    assert error in done.output


def test_the_options_of_localai(folder: Path) -> None:
    (folder / "m.yaml").write_text(RING)
    done = run("localai", str(folder / "m.yaml"), "--nodes", "a,b")
    deployment = made(done, folder)["ModelDeployment"]
    assert isinstance(deployment, ModelDeployment)
    sampling = deployment.spec.sampling
    assert sampling is not None
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (512, 0.2, 0.9)
    assert "options[5]: trust_remote_code:true: the fleet never runs code of a model" in done.output
    (folder / "m.yaml").write_text(RING.replace("temp:0.2", "temp:warm"))
    refused = run("localai", str(folder / "m.yaml"), "--nodes", "a,b")
    assert refused.exit_code == 1
    assert "options[3]: temp must be a number, got 'warm'" in refused.output


def test_the_environment_of_localai(folder: Path) -> None:
    (folder / "m.yaml").write_text(QUICK)
    alone = made(run("localai", str(folder / "m.yaml")), folder)
    assert set(alone) == {"ModelDeployment"}
    deployment = alone["ModelDeployment"]
    assert isinstance(deployment, ModelDeployment)
    assert deployment.spec.sampling is not None
    assert (deployment.spec.sampling.temperature, deployment.spec.sampling.top_k) == (0.7, 40)
    env = {
        "MLX_DISTRIBUTED_HOSTFILE": str(folder / "hostfiles" / "hosts-2node.json"),
        "MLX_DISTRIBUTED_BACKEND": "jaccl",
    }
    group = made(run("localai", str(folder / "m.yaml"), **env), folder)["ShardGroup"]
    assert isinstance(group, ShardGroup)
    assert (group.spec.backend, len(group.spec.members)) == ("jaccl", 2)
    env = {"MLX_DISTRIBUTED_HOSTFILE": str(folder / "one.json")}
    found = made(run("localai", str(folder / "m.yaml"), **env), folder)
    assert set(found) == {"ModelDeployment", "NodePool"}
    # Options of the model come before the environment.
    (folder / "m.yaml").write_text(RING)
    words = ("localai", str(folder / "m.yaml"), "--nodes", "a,b")
    group = made(run(*words, MLX_DISTRIBUTED_BACKEND="jaccl"), folder)["ShardGroup"]
    assert isinstance(group, ShardGroup)
    assert group.spec.backend == "ring"


def test_the_ring_servers_default_of_max_tokens(folder: Path) -> None:
    text = "MODEL_REPO=mlx-community/Qwen3-14B-4bit\nDEFAULT_MAX_TOKENS=50\n"
    deployment = made(run("ring", "-", "--nodes", "a,b", stdin=text), folder)["ModelDeployment"]
    assert isinstance(deployment, ModelDeployment)
    assert deployment.spec.sampling is not None
    assert deployment.spec.sampling.max_tokens == 50


def test_all_variables_of_the_ring_server(folder: Path) -> None:
    given = literals.variables(literals.RING_VARIABLES)
    assert len(given) == 20
    given["KV_CACHE_MAX_SIZE"] = ""  # "(none)"
    text = "".join(f"{name}={value}\n" for name, value in given.items())
    done = run("ring", "-", "--nodes", "mini1,mini2", stdin=text)
    found = made(done, folder)
    group, deployment = found["ShardGroup"], found["ModelDeployment"]
    assert isinstance(group, ShardGroup)
    assert isinstance(deployment, ModelDeployment)
    assert [member.addresses for member in group.spec.members] == [
        ("192.168.5.1",),
        ("192.168.5.2",),
    ]
    assert (group.spec.backend, group.spec.parallelism) == ("ring", "Tensor")
    spec = deployment.spec
    assert spec.model.label == "mlx-community/DeepSeek-Coder-V2-Lite-Instruct-8bit@main"
    assert spec.context_length == 4096
    assert spec.routing.timeouts.request == "2m"
    assert spec.sampling is not None
    assert spec.sampling.max_tokens == 50
    assert spec.performance == "Always"
    used = {"MODEL_REPO", "MAX_SEQUENCE_LENGTH", "REQUEST_TIMEOUT_SECONDS", "DEFAULT_MAX_TOKENS"}
    used |= {"DISTRIBUTED_BACKEND", "NUM_DEVICES", "KV_CACHE_MAX_SIZE", "API_HOST", "WORKER_HOSTS"}
    for name in set(given) - used:
        assert f": {name}: " in done.output, name


def test_host_files_of_the_ring_server(folder: Path) -> None:
    pair = literals.RING_RDMA_HOSTS.text
    group = made(run("hostfile", "-", "--nodes", "mini2,mini1", stdin=pair), folder)["ShardGroup"]
    assert isinstance(group, ShardGroup)
    assert group.spec.backend == "jaccl"
    assert group.spec.members[1].rdma == {"mini2": ("rdma_device_path",)}
    three = literals.RING_THREE_HOSTS.text
    refused = run("hostfile", "-", stdin=three)
    assert refused.exit_code == 1
    assert "does not name the node of rank 0. Give --nodes" in refused.output
    group = made(run("hostfile", "-", "--nodes", "a,b,c", stdin=three), folder)["ShardGroup"]
    assert isinstance(group, ShardGroup)
    assert (group.spec.backend, len(group.spec.members)) == ("ring", 3)


def test_all_variables_of_mlx_jaccl_cluster(folder: Path) -> None:
    given = literals.variables(literals.JACCL_VARIABLES)
    assert len(given) == 9
    # Those that are described instead of given.
    given |= {"MODEL_DIR": "~/models_mlx/Qwen3-4B", "MODEL_ID": "qwen", "CTRL_HOST": "192.168.1.14"}
    lines = [f"{name}={value}" for name, value in given.items()]
    lines += [one for one in literals.JACCL_NODE_VARIABLES.text.split() if "=1" in one]
    assert len(lines) == 12
    (folder / "all.env").write_text("\n".join(lines))
    done = run("jaccl", str(folder / "all.env"))
    found = made(done, folder)
    group, deployment = found["ShardGroup"], found["ModelDeployment"]
    assert isinstance(group, ShardGroup)
    assert isinstance(deployment, ModelDeployment)
    assert group.spec.environment == {"MLX_METAL_FAST_SYNCH": "1"}
    assert deployment.spec.routing.queueing is not None
    assert deployment.spec.routing.queueing.depth == 8
    assert deployment.spec.routing.timeouts.request == "2m"
    for name in ("HTTP_HOST", "HTTP_PORT", "CTRL_HOST", "CTRL_PORT", "HF_HUB_OFFLINE"):
        assert f": {name}: " in done.output, name


@pytest.mark.parametrize(
    ("model", "hosts", "nodes", "backend", "parallelism"),
    [
        (literals.LOCALAI_RING, literals.LOCALAI_RING_HOSTS, "a,b", "ring", "Auto"),
        (literals.LOCALAI_RING, literals.LOCALAI_THREE_HOSTS, "a,b,c", "ring", "Auto"),
        (literals.LOCALAI_JACCL, literals.LOCALAI_DEVICES, "a,b", "jaccl", "Auto"),
    ],
)
def test_models_and_host_files_of_localai(
    folder: Path,
    model: literals.Literal,
    hosts: literals.Literal,
    nodes: str,
    backend: str,
    parallelism: str,
) -> None:
    (folder / "m.yaml").write_text(model.text)
    (folder / "devices.json").write_text(hosts.text)
    words = ("--hostfile", str(folder / "devices.json"), "--nodes", nodes)
    found = made(run("localai", str(folder / "m.yaml"), *words), folder)
    group, deployment = found["ShardGroup"], found["ModelDeployment"]
    assert isinstance(group, ShardGroup)
    assert isinstance(deployment, ModelDeployment)
    assert (group.spec.backend, group.spec.parallelism) == (backend, parallelism)
    assert [member.node for member in group.spec.members] == nodes.split(",")
    assert deployment.spec.sharding == group.metadata.name
    assert deployment.spec.model.label == "mlx-community/Llama-3.2-1B-Instruct-4bit@main"


def test_the_quick_start_of_localai(folder: Path) -> None:
    (folder / "m.yaml").write_text(literals.LOCALAI_QUICK_START.text)
    found = made(run("localai", str(folder / "m.yaml")), folder)
    deployment = found.pop("ModelDeployment")
    assert isinstance(deployment, ModelDeployment)
    assert (deployment.metadata.name, found) == ("llama-distributed", {})
    assert deployment.spec.sharding == "Auto"
    assert deployment.spec.model.label == "mlx-community/Llama-3.2-1B-Instruct-4bit@main"
