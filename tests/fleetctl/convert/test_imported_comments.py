"""Comments of the files of other tools come over with the settings that are kept; secrets in them do not."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from fleetctl.verbs.import_ import importing
from tests.support.manifests_texts import read

MESH = """\
# our office mesh
mesh:
  discovery:
    # the two Macs in the lab
    - type: static
      hosts:
        - mac-1.local:4000   # by the window
        - mac-2.local:4000
  # how requests are spread
  routing:
    strategy: scored  # measured in March
    weights:
      model_loaded: 0.4  # most important
      memory_headroom: 0.2
      queue_depth: 0.3
      cache_affinity: 0.1
  tiers:
    # for chats
    - name: standard
      model: mlx-community/Qwen3-8B-4bit # the small one
    # api_key: sk-123456789012345678901234567890
    - name: premium
      model: mlx-community/Qwen3-32B-4bit
"""
RING = """\
# which model, agreed with Anna
MODEL_REPO=mlx-community/Qwen3-14B-4bit
WORKER_HOSTS=mac-2

# no comment of a setting

# Two minutes are enough
# for most
REQUEST_TIMEOUT_SECONDS=120
API_HOST=mac-1.local
NUM_DEVICES=2
"""


def imported(tool: str, text: str, path: Path, *words: str) -> str:
    path.write_text(text)
    done = CliRunner().invoke(importing, [tool, str(path), *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_comments_of_yaml_stand_at_the_fields_of_their_settings(tmp_path: Path) -> None:
    text = imported("mesh", MESH, tmp_path / "mesh.yaml")
    for lines in (
        "  # our office mesh\n  # the two Macs in the lab\n  nodes:  # by the window\n  - mac-1\n",
        "      # for chats\n      repo: mlx-community/Qwen3-8B-4bit  # the small one\n",
        "    # how requests are spread\n    strategy: Scored  # measured in March\n"
        "    # most important\n    weights:\n",
    ):
        assert lines in text
    # Two deployments have the routing; the first one has its comments.
    assert text.count("measured in March") == 1
    assert "sk-123" not in text
    assert "# (a comment that may hold a secret, not copied)\n" in text
    assert [one.obj.kind for one in read(text)] == ["NodePool", *["ModelDeployment"] * 2]


def test_comments_of_variables_stand_at_their_fields(tmp_path: Path) -> None:
    text = imported("ring", RING, tmp_path / "ring.env", "--nodes", "mac-1,mac-2")
    assert (
        "      # which model, agreed with Anna\n      repo: mlx-community/Qwen3-14B-4bit\n" in text
    )
    assert '      # Two minutes are enough\n      # for most\n      request: "2m"\n' in text
    assert "no comment of a setting" not in text


@pytest.mark.parametrize("mark", ["\x1b[31m", "x" * 5000])
def test_hostile_comments_are_cleaned(tmp_path: Path, mark: str) -> None:
    text = imported("ring", RING.replace("agreed", mark), tmp_path / "ring.env", "--nodes", "a,b")
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) < 500
