"""The verb `fleetctl simulate`: placements, node failures, added nodes, and error messages."""

import asyncio
import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fleetctl.verbs.simulate import simulate
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


@pytest.mark.ci
@pytest.mark.parametrize(("words", "shown"), CONSOLES, ids=["fail", "lose-each", "week"])
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


def test_a_model_can_be_a_folder(tmp_path: Path, models_dir: Path) -> None:
    fleet = FLEET.replace("parameters: 8B", f"dir: {models_dir / 'tiny'}")
    done = run(tmp_path, "-o", "json", fleet=fleet)
    (step,) = json.loads(done.output)["steps"]
    assert all(place["memoryBytes"] < 2 * 2**30 for place in step["placements"])


def test_the_example_of_the_documentation_works() -> None:
    words = ["-f", str(EXAMPLES / "manifests"), "--fleet", str(EXAMPLES / "fleet.yaml")]
    done = CliRunner().invoke(simulate, [*words, "--fail", "studio-1", "--add", "M4 Max:128Gi"])
    assert done.exit_code == 0, done.output
    assert "llama-0 moves from studio-1 to added-1" in done.output
