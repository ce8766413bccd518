"""The documentation says what is so: generated parts are current, versions agree, examples load."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from docs.generate import generated
from manifests.load import load_objects
from manifests.validate import StoreNames, validate
from manifests.yaml import nodes
from schemas import kinds
from schemas.json_schema import json_schema, user_kinds
from schemas.routing import Routing

ROOT = Path(__file__).parent.parent


def test_generated_files_are_current() -> None:
    for path, content in generated().items():
        assert path.read_text() == content, f"{path.name} is stale: run `make docs`"


def test_generated_files_are_the_same_whoever_generates_them() -> None:
    # A folder below a home would be the builder's own: a default that should be said in words.
    for path, content in generated().items():
        assert re.search(r"/(?:root|(?:home|Users)/\w+)/\.", content) is None, path.name
        assert f"{Path.home()}/" not in content, path.name


def test_the_changelog_begins_with_the_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.search(r"^## \[([0-9.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == project["version"]


def test_the_readme_opens_with_the_two_commands() -> None:
    head = (ROOT / "README.md").read_text().split("```")[1].split()
    assert head[:2] == ["make", "demo"]
    assert "make test" in (ROOT / "README.md").read_text().split("```")[1]


@pytest.mark.parametrize("path", ["README.md", "docs/architecture.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(path: str) -> None:
    page = ROOT / path
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), f"{path}: {link}"


def test_the_lock_names_no_host_and_has_hashes() -> None:
    text = (ROOT / "requirements.txt").read_text()
    assert not re.search(r"https?://|index-url|find-links", text)
    pinned = re.findall(r"^[a-z0-9][^\n]*==[^\n]*\\$", text, re.MULTILINE)
    assert len(pinned) > 50
    assert text.count("--hash=sha256:") >= len(pinned)


def test_examples_are_good_manifests() -> None:
    folders = [str(ROOT / "examples" / name) for name in ("quickstart", "manifests")]
    loaded = load_objects(folders)
    assert {item.obj.kind for item in loaded} >= {
        "ModelDeployment", "ModelRoute", "NodePool", "ShardGroup",
    }  # fmt: skip
    assert validate(loaded, StoreNames()) == []  # all of them can be applied together


def test_an_example_has_every_field_of_routing() -> None:
    """With the values that count without it, as it says, where there are any."""
    loaded = load_objects([str(ROOT / "examples" / "manifests" / "routing.yaml")])
    (document,) = (item.document for item in loaded if item.obj.name == "coder")
    node = nodes.find_node(document.root, ("spec", "routing"))
    assert node is not None
    declared = nodes.plain_value(node)
    complete = Routing.model_validate_json(json.dumps(declared))
    assert json.loads(complete.model_dump_json(by_alias=True)) == declared
    optional = ("timeouts", "hedging", "queueing")
    assert (
        complete.model_copy(update={name: getattr(Routing(), name) for name in optional})
        == Routing()
    )


def test_schemas_leave_out_what_the_fleet_writes() -> None:
    for kind in user_kinds():
        tree = json_schema(kind)
        assert "status" not in tree["properties"]
        assert "uid" not in json.dumps(tree["$defs"]["ObjectMeta"]["properties"])
        assert tree["additionalProperties"] is False


def test_every_kind_can_be_found_by_every_name() -> None:
    for kind in kinds.KINDS:
        for word in (kind.name, kind.plural, kind.short, kind.name.upper()):
            assert kinds.by_alias(word) is kind
