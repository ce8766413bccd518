"""`fleetctl import` on the literal files of the five systems: whole outputs, as golden files that people read.

Every output is applied to an empty store. Files of other releases of these systems, and the examples, stand beside.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner

from fleetctl.verbs.import_ import importing
from manifests.load import load_objects
from manifests.validate import StoreNames, validate
from schemas.wire.discovery import SERVICE, Announcement, parse, render
from tests.seeds import literals
from tests.support.manifests_texts import read

GOLDEN = Path(__file__).parent / "golden"
INPUTS = Path(__file__).parent / "inputs"
EXAMPLES = Path(__file__).parents[2] / "examples" / "import"
HOST_FILES = {
    "hosts-2node.json": literals.JACCL_HOSTS.text,
    "ring.json": literals.LOCALAI_RING_HOSTS.text,
    "three.json": literals.LOCALAI_THREE_HOSTS.text,
    "devices.json": literals.LOCALAI_DEVICES.text,
    "one.json": '[{"ssh": "mac1.local", "ips": ["192.168.1.14"]}]',
}
RING_VARIABLES = {**literals.variables(literals.RING_VARIABLES), "KV_CACHE_MAX_SIZE": ""}
JACCL_VARIABLES = {
    **literals.variables(literals.JACCL_VARIABLES),
    # Those that are described instead of given.
    "MODEL_DIR": "~/models_mlx/Qwen3-4B",
    "MODEL_ID": "qwen",
    "CTRL_HOST": "192.168.1.14",
    "HOSTFILE": "hosts-2node.json",
    **dict(re.findall(r"([A-Z_]+)=(1)", literals.JACCL_NODE_VARIABLES.text)),
}
SIZES = ("Qwen3-30B-A3B-4bit", "Mixtral-8x7B", "Llama-3.2-1B", "Qwen3-8B", "phi-mini-4bit")
CLOSED = literals.SERVING_STATIC.text.replace("enabled: true  # Auto", "enabled: false  # Auto")


def env_file(variables: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def given(name: str) -> str:
    """Return a file of a user of such a system."""
    return (INPUTS / name).read_text()


@dataclass(frozen=True, slots=True)
class Case:
    """One call of `fleetctl import`."""

    verb: str
    text: str
    words: str = ""
    env: dict[str, str] = field(default_factory=dict)


CASES = {
    "mesh-discovery": Case("mesh", literals.MESH_DISCOVERY.text, "--name home --model org/m"),
    "mesh-configuration": Case("mesh", literals.MESH_CONFIGURATION.text, "--model org/m"),
    "mesh-without-a-model": Case("mesh", literals.MESH_CONFIGURATION.text),
    "mesh-example": Case("mesh", (EXAMPLES / "mesh.yaml").read_text()),
    "mesh-comments": Case("mesh", given("mesh-comments.yaml")),
    "mesh-kinds-as-words": Case("mesh", "mesh: {discovery: [mdns, tailscale]}"),
    "mesh-weights-of-another-strategy": Case(
        "mesh", "mesh: {routing: {strategy: random, weights: {queue_depth: 0.3}}}"
    ),
    "ring-variables": Case("ring", env_file(RING_VARIABLES), "--nodes mini1,mini2"),
    "ring-example": Case("ring", (EXAMPLES / "ring.env").read_text(), "--nodes mini-1,mini-2"),
    "ring-quoted": Case("ring", given("ring-quoted.env")),
    "ring-rdma-hosts": Case("hostfile", literals.RING_RDMA_HOSTS.text, "--nodes mini2,mini1"),
    "ring-three-hosts": Case("hostfile", literals.RING_THREE_HOSTS.text, "--nodes a,b,c"),
    "jaccl-hosts": Case("hostfile", literals.JACCL_HOSTS.text, "--name minis"),
    "jaccl-one-host": Case("hostfile", HOST_FILES["one.json"], "--name solo"),
    "jaccl-variables": Case("jaccl", env_file(JACCL_VARIABLES)),
    "jaccl-makefile": Case("jaccl", given("jaccl-makefile.mk"), "--model /models/Qwen3-4B"),
    "jaccl-one-mac": Case("jaccl", "MODEL_DIR=/m/x\nHOSTFILE=one.json\n"),
    "localai-quick-start": Case("localai", literals.LOCALAI_QUICK_START.text),
    "localai-ring": Case("localai", literals.LOCALAI_RING.text, "--hostfile ring.json --nodes a,b"),
    "localai-ring-of-three": Case(
        "localai", literals.LOCALAI_RING.text, "--hostfile three.json --nodes a,b,c"
    ),
    "localai-jaccl": Case(
        "localai", literals.LOCALAI_JACCL.text, "--hostfile devices.json --nodes a,b"
    ),
    # Options of the model come before the environment.
    "localai-options": Case(
        "localai",
        given("localai-options.yaml"),
        "--nodes a,b",
        {"MLX_DISTRIBUTED_BACKEND": "jaccl"},
    ),
    "localai-environment": Case(
        "localai",
        literals.LOCALAI_QUICK_START.text,
        env={"MLX_DISTRIBUTED_HOSTFILE": "hosts-2node.json", "MLX_DISTRIBUTED_BACKEND": "jaccl"},
    ),
    "localai-environment-of-one-mac": Case(
        "localai", literals.LOCALAI_QUICK_START.text, env={"MLX_DISTRIBUTED_HOSTFILE": "one.json"}
    ),
    "localai-list": Case("localai", given("localai-list.yaml")),
    "serving-static": Case("serving", literals.SERVING_STATIC.text, "--model a/Qwen3-8B"),
    "serving-closed": Case("serving", CLOSED, "--model a/Qwen3-27B"),
    "serving-configuration": Case(
        "serving", literals.SERVING_CONFIGURATION.text, "--model a/Qwen3-30B-A3B"
    ),
    "serving-without-a-model": Case("serving", literals.SERVING_CONFIGURATION.text),
    "serving-scenario-1": Case("serving", literals.SERVING_SCENARIO_1.text, "--model a/Qwen3-8B"),
    "serving-scenario-2": Case("serving", literals.SERVING_SCENARIO_2.text, "--model a/Qwen3-8B"),
    "serving-scenario-3": Case(
        "serving", literals.SERVING_SCENARIO_3.text, " ".join(f"--model a/{s}" for s in SIZES)
    ),
    "serving-preferred": Case(
        "serving", given("serving-preferred.yaml"), "--nodes s-1,s-2 --model /models/Qwen3-4B"
    ),
    "serving-camel-case": Case("serving", given("serving-camel-case.yaml"), "--model a/b"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_file_becomes_the_manifests_of_its_golden_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, text in HOST_FILES.items():
        (tmp_path / file).write_text(text)
    case = CASES[name]
    words = [case.verb, "-", *case.words.split()]
    done = CliRunner().invoke(importing, words, input=case.text, env=case.env)
    assert done.exit_code == 0, done.output
    golden = GOLDEN / f"{name}.yaml"
    if request.config.getoption("--update-golden"):
        golden.write_text(done.output)
    assert done.output == golden.read_text(), "if this is right: pytest --update-golden"
    (tmp_path / "made.yaml").write_text(done.output)
    loaded = load_objects([str(tmp_path / "made.yaml")])
    assert validate(loaded, StoreNames()) == []
    assert [loaded_object.obj.kind for loaded_object in read(done.output)]


@pytest.mark.parametrize("name", ["serving-configuration", "mesh-configuration", "serving-static"])
def test_each_value_becomes_a_field_or_is_listed_with_its_line(name: str) -> None:
    output = (GOLDEN / f"{name}.yaml").read_text()
    renamed = {"strategy", "sticky_sessions", "session_ttl_ms", "min_memory_gb", "cache_affinity"}
    renamed |= {"model_loaded", "memory_headroom", "queue_depth"}
    for number, line in enumerate(CASES[name].text.splitlines(), 1):
        key, _, value = line.split("#")[0].strip().removeprefix("- ").partition(": ")
        first = value.strip().strip("[]").split(", ")[0].strip("\"'")
        assert not first or f"line {number}: " in output or first in output or key in renamed, line


def test_the_advertisement_of_the_mesh() -> None:
    """The mesh tells its models and memory to any machine of the network; the fleet tells how to reach it."""
    theirs = literals.MESH_ADVERTISEMENT.text
    assert "txt: version=0.3.0, tiers=standard,fast" in theirs
    ours = Announcement(role="gateway", name="mac-mini-1", fleet="0" * 32)
    assert set(render(ours)) == {"v", "role", "name", "fleet"}
    assert parse(render(ours)) == ours
    assert SERVICE == "_mlx-fleet._tcp.local."
