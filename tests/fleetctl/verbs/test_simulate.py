"""The verb `fleetctl simulate`: placements, node failures, added nodes, and error messages."""

import asyncio
import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fleetctl.verbs.simulate import simulate
from manifests.yaml import parser
from tests.support.hub import REPO, StandInHub
from tests.support.hub_repositories import servable_files

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "simulate"
CONSOLES = re.findall(
    r"```console\n\$ fleetctl simulate (.*?)\n(.*?)```",
    (ROOT / "docs" / "operations" / "simulate.md").read_text(),
    re.DOTALL,
)
FLEET = """
nodes:
- {name: a, chip: M4 Max, memory: 64Gi}
- {name: b, chip: Apple M4 Pro, memory: 48Gi, labels: {room: lab}}
models:
- {path: eight, parameters: 8B}
"""
DEPLOYMENT = """
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: chat}
spec: {model: {path: eight}, replicas: 2, placement: {maxReplicasPerNode: 1}}
"""


def run(tmp_path: Path, *flags: str, fleet: str = FLEET, manifest: str = DEPLOYMENT) -> Result:
    (tmp_path / "fleet.yaml").write_text(fleet)
    (tmp_path / "chat.yaml").write_text(manifest)
    words = ["-f", str(tmp_path / "chat.yaml"), "--fleet", str(tmp_path / "fleet.yaml"), *flags]
    return CliRunner().invoke(simulate, words)


def test_replicas_are_placed(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("apply: 2 of 2 replicas answer after ")
    lines = done.output.splitlines()
    titles = [number for number, line in enumerate(lines) if line.startswith(("a  ", "b  "))]
    assert [lines[number + 1].split()[0] for number in titles] == ["chat-0", "chat-1"]
    assert "does not answer" not in done.output


HUB_DEPLOYMENT = f"""
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {{name: chat}}
spec:
  model: {{hub: {{repo: {REPO}}}}}
  contextLength: 256
  replicas: 2
  preload: {{nodes: 2}}
  placement: {{maxReplicasPerNode: 1}}
"""


async def test_a_hub_model_is_simulated_by_what_the_hub_says(tmp_path: Path) -> None:
    hub = StandInHub(repos={REPO: servable_files()})
    nothing = FLEET.partition("models:")[0]

    async def simulated(*flags: str, fleet: str) -> Result:
        return await asyncio.to_thread(run, tmp_path, *flags, fleet=fleet, manifest=HUB_DEPLOYMENT)

    async with hub.serve():
        where = ("--hub-endpoint", hub.endpoint)
        done = await simulated(*where, "--fail", "a", fleet=nothing)
        assert done.exit_code == 0, done.output
        assert done.output.startswith("apply: 2 of 2 replicas answer after ")
        assert "power loss of a: 1 of 2 replicas answer" in done.output
        assert not hub.requests("GET", "/resolve/main"), "only the commit is read"
        absent = await simulated("--hub-endpoint", f"{hub.endpoint}/nowhere", fleet=nothing)
        assert absent.exit_code == 1
        assert (
            f'describe the model in fleet.yaml: {{path: "{REPO}", parameters: 8B}}' in absent.output
        )
        hub.seen.clear()
        described = nothing + f'models: [{{path: "{REPO}", parameters: 70B}}]'
        large = await simulated(*where, fleet=described)
        assert large.exit_code == 0, large.output
        assert "of 2 replicas answer" in large.output
        assert large.output != done.output
        assert hub.seen == [], "a described model needs no hub"


def test_the_output_is_deterministic(tmp_path: Path) -> None:
    flags = ("--fail", "a", "--add", "M4 Max:64Gi")
    assert run(tmp_path, *flags).output == run(tmp_path, *flags).output


@pytest.mark.ci
@pytest.mark.parametrize(("words", "shown"), CONSOLES, ids=["fail", "lose-each"])
def test_the_documented_output_is_what_the_command_prints(
    words: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines `...` of the page, and ends of lines after it, stand for what the page leaves out."""
    monkeypatch.chdir(ROOT)
    printed = iter(CliRunner().invoke(simulate, shlex.split(words)).output.splitlines())
    for line in shown.splitlines():
        head, dots, _ = line.partition("...")
        found = head.rstrip() == "" or any(
            one.startswith(head) if dots else one == line for one in printed
        )
        assert found, f"not printed, or not in this order: {line}"


def test_a_lost_replica_waits_for_an_added_node(tmp_path: Path) -> None:
    done = run(tmp_path, "--fail", "a", "--add", "Apple M4 Pro:24Gi", "-o", "json")
    begun, lost, added = json.loads(done.output)["steps"]
    assert [p["node"] for p in begun["placements"]] == ["a", "b"]
    assert lost["event"] == "power loss of a"
    assert lost["lost"] == ["chat-0"]
    (missing,) = lost["missing"]
    assert (missing["missing"], missing["wanted"]) == (1, 2)
    assert "0/2 nodes fit: 1 NotReady, 1 full up" in missing["why"]
    assert added["missing"] == []
    assert added["moves"] == [
        {
            "deployment": "chat",
            "from": {"replica": "chat-0", "node": "a"},
            "to": {"replica": "chat-0", "node": "added-1"},
            "because": "a is lost",
        }
    ]
    assert added["tookSeconds"] > 0


def test_a_lost_node_is_replaced_after_lease_and_grace_period(tmp_path: Path) -> None:
    done = run(tmp_path, "--fail", "b", "-o", "json", manifest=DEPLOYMENT.replace("1}", "2}"))
    _, lost = json.loads(done.output)["steps"]
    assert lost["missing"] == []
    assert {p["node"] for p in lost["placements"]} == {"a"}
    # A lease of 4 s and 30 s of grace, then a start and a load.
    assert 34 < lost["tookSeconds"] < 60


def test_the_text_reports_moved_and_lost_replicas(tmp_path: Path) -> None:
    done = run(tmp_path, "--fail", "a", "--add", "M4 Max:64Gi")
    assert "chat-0 is lost with a, and no other node can take it" in done.output
    assert "chat: 1 of 2 replicas missing: 0/2 nodes fit" in done.output
    assert "chat-0 moves from a to added-1 (a is lost)" in done.output


def test_yaml_and_json_agree(tmp_path: Path) -> None:
    done = run(tmp_path, "-o", "yaml")
    assert parser.parse(done.output, "it").problems == ()
    assert json.loads(run(tmp_path, "-o", "json").output)["steps"][0]["event"] == "apply"
    assert done.output.startswith("steps:\n- event: apply\n")


def test_taints_and_selectors_apply(tmp_path: Path) -> None:
    fleet = FLEET.replace(
        "memory: 64Gi}", "memory: 64Gi, taints: [{key: mine, effect: NoSchedule}]}"
    )
    done = run(tmp_path, "-o", "json", fleet=fleet)
    (step,) = json.loads(done.output)["steps"]
    assert [p["node"] for p in step["placements"]] == ["b"]
    assert "taint" in step["missing"][0]["why"]


def test_a_model_can_be_a_folder(tmp_path: Path, models_dir: Path) -> None:
    fleet = FLEET.replace("parameters: 8B", f"dir: {models_dir / 'tiny'}")
    done = run(tmp_path, "-o", "json", fleet=fleet)
    (step,) = json.loads(done.output)["steps"]
    assert all(place["memoryBytes"] < 2 * 2**30 for place in step["placements"])


def test_adapters_and_draft_models_need_memory(tmp_path: Path) -> None:
    source = "{path: eight, adapter: law, draft: {path: half}}"
    manifest = DEPLOYMENT.replace("{path: eight}", source)
    refused = run(tmp_path, manifest=manifest)
    assert refused.exit_code == 1
    assert "spec.model.draft.path: fleet.yaml" in refused.output.replace(f"{tmp_path}/", "")
    assert 'Add to its models: {path: "half", parameters: 500M}' in refused.output
    fleet = FLEET + "- {path: half, parameters: 500M}\n"
    (more,) = json.loads(run(tmp_path, "-o", "json", fleet=fleet, manifest=manifest).output)[
        "steps"
    ]
    (less,) = json.loads(run(tmp_path, "-o", "json").output)["steps"]
    sizes = [step["placements"][0]["memoryBytes"] for step in (less, more)]
    assert sizes[1] > sizes[0] + 84 * 2**20


def test_the_example_of_the_documentation_works() -> None:
    words = ["-f", str(EXAMPLES / "manifests"), "--fleet", str(EXAMPLES / "fleet.yaml")]
    done = CliRunner().invoke(simulate, [*words, "--fail", "studio-1", "--add", "M4 Max:128Gi"])
    assert done.exit_code == 0, done.output
    assert "llama-0 moves from studio-1 to added-1" in done.output


PRIORITIES = """
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: first}
spec: {model: {path: eight}, priority: 10, resources: {memory: 30Gi}}
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: last}
spec: {model: {path: eight}, resources: {memory: 30Gi}}
"""


def test_a_displaced_replica_names_who_took_its_place(tmp_path: Path) -> None:
    """Two Macs with room for one replica each: the loss of one leaves room for the higher priority only."""
    fleet = FLEET.replace("memory: 64Gi", "memory: 48Gi")
    begun = run(tmp_path, "-o", "json", fleet=fleet, manifest=PRIORITIES)
    (step,) = json.loads(begun.output)["steps"]
    node = {place["replica"]: place["node"] for place in step["placements"]}["first-0"]
    done = run(tmp_path, "--fail", node, fleet=fleet, manifest=PRIORITIES)
    assert "(displaced by first-0: first-0 has priority 10, last-0 has 0)" in done.output


def test_a_model_that_is_too_large_is_told_from_one_without_room(tmp_path: Path) -> None:
    huge = run(tmp_path, fleet=FLEET.replace("8B", "400B"))
    assert "0/2 nodes fit: 2 too small even when empty (need 2" in huge.output
    crowded = DEPLOYMENT.replace("replicas: 2, placement: {maxReplicasPerNode: 1}", "replicas: 9")
    full = run(tmp_path, manifest=crowded.replace("replicas: 9", "replicas: 40"))
    assert "0/2 nodes fit: 2 short of memory (need " in full.output


def test_what_pools_reserve_is_shown(tmp_path: Path) -> None:
    pool = "kind: NodePool\nmetadata: {name: lab}\nspec: {nodes: [b], reserved: {memory: 4Gi}}\n"
    done = run(tmp_path, manifest=f"{DEPLOYMENT}---\napiVersion: fleet/v1alpha1\n{pool}")
    lines = done.output.splitlines()
    after = lines[next(n for n, line in enumerate(lines) if line.startswith("b  ")) :]
    assert next(line for line in after if "reserved" in line).split()[1:3] == ["4.0", "GiB"]


@pytest.mark.ci
def test_lose_each_agrees_with_the_loss_of_each_mac(tmp_path: Path) -> None:
    done = run(tmp_path, "--lose-each", "-o", "json")
    assert done.exit_code == 0, done.output
    found = {loss["node"]: loss for loss in json.loads(done.output)["loseEach"]}
    assert set(found) == {"a", "b"}
    for name, loss in found.items():
        _, lost = json.loads(run(tmp_path, "--fail", name, "-o", "json").output)["steps"]
        assert loss["notPlaced"] == lost["missing"]
        assert loss["mayBeLost"] is False
        assert loss["tookSeconds"] == lost["tookSeconds"]
    text = run(tmp_path, "--lose-each").output
    assert "Which single Mac may I lose? 0 of 2\n" in text
    # With room for both replicas on either Mac, each may be lost.
    roomy = run(tmp_path, "--lose-each", manifest=DEPLOYMENT.replace("1}", "2}"))
    assert "Which single Mac may I lose? 2 of 2\n" in roomy.output


# Invalid fleet files, and parts of the error message: place, problem, remedy.
BAD = [
    pytest.param("nodes: []\n", ["fleet.yaml:1:1: nodes:"], id="no-nodes"),
    pytest.param("models: []\n", ["nodes: is required"], id="nodes-missing"),
    pytest.param("- a\n", ["fleet.yaml:1:1: expected a mapping, got a list"], id="a-list"),
    pytest.param(
        FLEET.replace("M4 Max", "M4 Maxx"),
        ["fleet.yaml:3:", "nodes[0].chip", "'Apple M4 Max'"],
        id="chip",
    ),
    pytest.param(
        FLEET.replace("48Gi", "48GB"), ["fleet.yaml:4:", "nodes[1].memory", "48GB"], id="memory"
    ),
    pytest.param(
        FLEET.replace("labels", "lables"),
        ["fleet.yaml:4:", "nodes[1].lables: unknown field", "Did you mean labels?"],
        id="unknown-field",
    ),
    pytest.param(
        FLEET.replace("name: b", "name: a"),
        ["fleet.yaml:4:", "nodes[1].name: the node a is defined twice"],
        id="same-name",
    ),
    pytest.param(
        FLEET.replace("8B", "eight"), ["fleet.yaml:6:", "models[0].parameters"], id="parameters"
    ),
    pytest.param(
        FLEET.replace(", parameters: 8B", ""),
        ["fleet.yaml:6:", "models[0]", "either dir or parameters"],
        id="no-size",
    ),
    pytest.param(
        FLEET.replace("parameters: 8B", "dir: /nowhere/at-all"),
        ["fleet.yaml:6:", "models[0].dir", "/nowhere/at-all"],
        id="no-folder",
    ),
    pytest.param(
        FLEET.replace("path: eight", "path: nine"),
        ["chat.yaml:5:", "spec.model.path", 'path: "eight", parameters: 8B'],
        id="unknown-model",
    ),
    pytest.param(
        FLEET + "- {path: eight, parameters: 9B}\n",
        ["fleet.yaml:7:", "models[1].path", "defined twice"],
        id="model-twice",
    ),
]


@pytest.mark.parametrize(("fleet", "messages"), BAD)
def test_an_invalid_fleet_file_is_refused(tmp_path: Path, fleet: str, messages: list[str]) -> None:
    done = run(tmp_path, fleet=fleet)
    assert done.exit_code == 1
    assert done.output.startswith("error: nothing was simulated:\n")
    for message in messages:
        assert message in done.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--fail", "aa"), 'nodes "aa" not found; did you mean a?'),
        (("--fail", "a", "--fail", "a"), "name each node once"),
        (("--lose-each", "--fail", "a"), "--lose-each starts from the whole fleet"),
        (("--add", "M4 Max"), "expected CHIP:MEMORY, such as"),
        (("--add", "M9:64Gi"), "is not the chip of a Mac"),
        (("--add", "M4 Max:much"), "expected CHIP:MEMORY, such as"),
    ],
)
def test_invalid_flags_are_refused(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    done = run(tmp_path, *flags)
    assert done.exit_code in (1, 2)
    assert message in done.output
    assert "Traceback" not in done.output
