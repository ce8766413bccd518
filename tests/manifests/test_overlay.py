"""Tests of `manifests.overlay`: patches of a site over a common base."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests import strategic_merge, suggestions
from manifests.errors import ManifestErrors
from manifests.load import load_objects
from manifests.validate import StoreNames, validate
from manifests.yaml import nodes, parser
from manifests.yaml.nodes import YamlNode
from tests.support.golden_cases import Golden
from tests.support.sampling import samples

HEAD = "apiVersion: fleet/v1alpha1\n"
OVERLAY = HEAD + "kind: Overlay\nbase: [../base]\n"
POOL = HEAD + "kind: NodePool\nmetadata: {name: studios}\nspec:\n  nodes: [a, b]\n  priority: 1\n"


def node(text: str) -> YamlNode:
    (root,) = parser.parse(text, "test.yaml").documents
    return root


def over(base: str, patch: str) -> object:
    """Return the patched base, or the problem."""
    yaml_node, problems = strategic_merge.apply_patch(
        node(base), node(patch), source="p.yaml", about="X"
    )
    if problems:
        return [f"{p.line}:{p.column} {p.path}: {p.message}" for p in problems]
    return None if yaml_node is None else nodes.plain_value(yaml_node)


@pytest.mark.parametrize(
    ("base", "patch", "wanted"),
    [
        pytest.param("a: {b: 1, c: 2}", "a: {c: 3}", {"a": {"b": 1, "c": 3}}, id="mappings"),
        pytest.param("a: [1, 2]", "a: [3]", {"a": [3]}, id="lists-of-values-are-replaced"),
        pytest.param("a: 1\nb: 2", "a: null", {"b": 2}, id="null-removes"),
        pytest.param(
            "a: [{name: x, v: 1}, {name: y, v: 1}]", "a: [{name: y, v: 2}, {name: z}]",
            {"a": [{"name": "x", "v": 1}, {"name": "y", "v": 2}, {"name": "z"}]}, id="by-name",
        ),
        pytest.param(
            "a: [{deployment: x, weight: 1}]", "a: [{deployment: x, weight: 2}]", {"a": [{"deployment": "x", "weight": 2}]},
            id="by-deployment",
        ),
        pytest.param(
            "a: [{key: x, effect: p}, {key: x, effect: q}]", "a: [{key: x, effect: r}]", {"a": [{"key": "x", "effect": "r"}]},
            id="what-does-not-tell-items-apart-replaces",
        ),
        pytest.param("a: [{name: x}, {name: y}]", "a: [{name: x, $patch: delete}]", {"a": [{"name": "y"}]}, id="an-item-goes"),
        pytest.param("a: [{name: x}]", "a: [{$patch: replace}, {name: z}]", {"a": [{"name": "z"}]}, id="a-list-is-replaced"),
        pytest.param("a: {b: 1, c: 2}", "a: {$patch: replace, c: 3}", {"a": {"c": 3}}, id="replaced"),
        pytest.param("a: {b: 1}\nd: 1", "a: {$patch: delete}", {"d": 1}, id="deleted"),
        pytest.param("a: 1", "$patch: delete", None, id="the-object-goes"),
        pytest.param("a: 1", "b: null", ["1:1 b: null removes what the base does not have"], id="nothing-to-remove"),
        pytest.param(
            "a: [{name: x}]", "a: [{name: y, $patch: delete}]",
            ["1:5 a[0]: $patch: delete of name y, which the base does not have"], id="no-such-item",
        ),
        pytest.param("a: {b: 1}", "a: {$patch: merge}", ["1:5 a.$patch: unknown directive merge"], id="word"),
    ],
)  # fmt: skip
def test_a_patch_is_merged_into_its_base(base: str, patch: str, wanted: object) -> None:
    found = over(base, patch)
    if isinstance(wanted, list):
        assert isinstance(found, list)
        assert [one.replace('["$patch"]', ".$patch") for one in found] == wanted
    else:
        assert found == wanted


trees = st.recursive(
    st.integers() | st.booleans() | st.text("abc", max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)
mappings = st.dictionaries(st.sampled_from("abcd"), trees, max_size=4)


def reference(base: object, patch: object) -> object:
    """Merge by RFC 7386 without null: a strategic merge equals it without lists and directives."""
    if not isinstance(base, dict) or not isinstance(patch, dict):
        return patch
    return {**base, **{k: reference(base.get(k), v) for k, v in patch.items()}}


@settings(max_examples=samples(60), deadline=None)
@given(mappings, mappings)
def test_a_patch_without_lists_is_a_merge_patch(
    base: dict[str, object], patch: dict[str, object]
) -> None:
    assert over(json.dumps(base), json.dumps(patch)) == reference(base, patch)
    assert over(json.dumps(base), json.dumps({})) == base
    once = reference(base, patch)
    assert over(json.dumps(once), json.dumps(patch)) == once


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_yaml", ".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_site_is_merged_over_its_base(tmp_path: Path) -> None:
    write(
        tmp_path,
        base__pool_yaml=POOL,
        site__overlay_yaml=OVERLAY,
        site__pool_yaml=HEAD + "kind: NodePool\nmetadata: {name: studios}\nspec: {priority: 9}\n",
        site__more_yaml=POOL.replace("studios", "minis"),
        top__overlay_yaml=OVERLAY.replace("base]", "site]"),
        top__pool_yaml=HEAD + "kind: NodePool\nmetadata: {name: minis}\n$patch: delete\n",
    )
    for paths in ([tmp_path / "site"], [tmp_path / "site" / "overlay.yaml"]):
        loaded = load_objects([str(path) for path in paths])
        assert [item.obj.name for item in loaded] == ["studios", "minis"]
        spec = loaded[0].obj.model_dump()["spec"]
        assert (spec["nodes"], spec["priority"]) == (("a", "b"), 9)
    assert [item.obj.name for item in load_objects([str(tmp_path / "top")])] == ["studios"]


CHAT = HEAD + "kind: ModelDeployment\nmetadata: {name: chat}\nspec: {model: {path: m}}\n"
LONG = CHAT.replace(
    "{model: {path: m}}", "{contextLength: 8192, model: {path: m}, kvCache: {window: 4096}}"
)
A_POOL, A_CHAT = HEAD + "kind: NodePool\n", HEAD + "kind: ModelDeployment\nmetadata: {name: chat}\n"
LISTED = OVERLAY + "resources: [new.yaml]\n"
TYPO = CHAT.replace("chat", "chatt").replace("{model: {path: m}}", "{replicas: 2}")
# The overlay, and the other files of the site.
BROKEN: dict[str, list[tuple[str, dict[str, str]]]] = {
    "Overlays": [
        (HEAD + "kind: Overlay\n", {}),
        (OVERLAY.replace("base: [../base]", "bases: [../base]"), {}),
        (OVERLAY + "patches: [{path: x.yaml}]\n", {}),
        (OVERLAY + "resources: [no.yaml]\n", {}),
        (OVERLAY.replace("../base]", "../bass]"), {}),
        (OVERLAY.replace("../base]", ".]"), {}),
        (OVERLAY.replace("../base]", "/etc]"), {}),
        (OVERLAY.replace("../base]", "../base, ../more]"), {}),
    ],
    "Patches": [
        (OVERLAY, {"p.yaml": A_POOL + "metadata: {name: studios}\nspec:\n  priority: high\n  nods: [c]\n"}),
        (OVERLAY, {"p.yaml": A_CHAT + "spec:\n  contextLength: 2048\n"}),
        (OVERLAY, {"p.yaml": A_CHAT + "spec:\n  model: null\n"}),
        (OVERLAY, {"p.yaml": A_POOL + "metadata: {name: studio}\n$patch: delete\n"}),
    ],
    "Patches and new objects": [
        (OVERLAY, {"p.yaml": TYPO}),
        (OVERLAY, {"p.yaml": CHAT.replace("chat", "chta")}),
        (LISTED, {"p.yaml": CHAT.replace("chat", "coder"), "new.yaml": CHAT.replace("chat", "other")}),
        (LISTED, {"new.yaml": CHAT}),
    ],
}  # fmt: skip


def test_messages_about_overlays(golden: Golden, tmp_path: Path) -> None:
    """The base has the pool studios and the deployment chat; another folder, `more`, has chat, too."""

    def messages(at: int, overlay: str, files: dict[str, str]) -> list[str]:
        root = tmp_path / str(at)
        write(root, base__pool_yaml=POOL, base__chat_yaml=LONG, more__b_yaml=CHAT)
        write(root, site__overlay_yaml=overlay)
        for name, text in files.items():
            (root / "site" / name).write_text(text)
        with pytest.raises(ManifestErrors) as caught:
            load_objects([str(root / "site")])
        return [str(problem).replace(f"{root}/", "") for problem in caught.value.problems]

    numbers = itertools.count()
    sections = {
        title: [
            (
                "---\n".join([overlay, *(f"# {name}\n{text}" for name, text in files.items())]),
                messages(next(numbers), overlay, files),
            )
            for overlay, files in cases
        ]
        for title, cases in BROKEN.items()
    }
    golden.check("manifests/overlays.txt", sections)


@pytest.mark.parametrize("name", ["chatt", "chat-2", "coder"])
def test_resources_are_new_objects(tmp_path: Path, name: str) -> None:
    write(
        tmp_path,
        base__chat_yaml=CHAT,
        site__overlay_yaml=OVERLAY + "resources: [more]\n",
        site__more__new_yaml=CHAT.replace("chat", name),
        site__chat_yaml=CHAT.replace("{model: {path: m}}", "{replicas: 3}"),
    )
    loaded = load_objects([str(tmp_path / "site")])
    assert [item.obj.name for item in loaded] == ["chat", name]


@pytest.mark.parametrize("name", ["chat-2", "coder"])
def test_without_resources_a_complete_object_of_another_name_is_new(
    tmp_path: Path, name: str
) -> None:
    new = CHAT.replace("chat", name)
    write(tmp_path, base__chat_yaml=CHAT, site__overlay_yaml=OVERLAY, site__new_yaml=new)
    assert [item.obj.name for item in load_objects([str(tmp_path / "site")])] == ["chat", name]


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("chatt", "chat", True),
        ("cat", "chat", True),
        ("chst", "chat", True),
        ("chta", "chat", True),
        ("chat", "chat", False),
        ("chat2", "chat", False),
        ("mac-1", "mac-2", False),
        ("tach", "chat", False),
        ("chatter", "chat", False),
    ],
)
def test_typing_errors(word: str, known: str, expected: bool) -> None:
    assert suggestions.is_typing_error(word, known) is expected


@pytest.mark.parametrize("site", ["berlin", "lab"])
def test_the_example_is_valid(site: str) -> None:
    root = Path(__file__).parents[2] / "examples" / "gitops"
    loaded = load_objects([str(root / "sites" / site)])
    assert validate(loaded, StoreNames()) == []
    assert [item.obj.kind for item in load_objects([str(root / "fleet" / f"{site}.yaml")])] == [
        "GitSource"
    ]
