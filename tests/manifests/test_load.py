"""Tests of `manifests.load`: files, folders, the YAML 1.2 core schema, and arbitrary texts."""

import math
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from manifests import load
from manifests.errors import ManifestErrors
from manifests.trees import Tree, object_tree
from manifests.yaml import nodes, parser
from schemas import kinds
from schemas.deployment import ModelDeployment
from tests.support.golden_cases import Golden
from tests.support.manifests_texts import complaints, deployment, pool, read

EXAMPLES = Path(__file__).parents[2] / "examples" / "manifests"


def test_every_example_loads() -> None:
    loaded = load.load_objects([str(EXAMPLES)])
    shown = {item.obj.kind for item in loaded}
    assert shown == {kind.name for kind in kinds.KINDS if kind.written_by_users}


def test_documents_know_their_file_and_line() -> None:
    loaded = read("# first\n" + deployment("a") + "---\n---\n" + pool("p"))
    assert [(i.key, i.source, i.line) for i in loaded] == [
        (("ModelDeployment", "a"), "standard input", 3),
        (("NodePool", "p"), "standard input", 14),
    ]


def test_a_folder_is_read_in_order_and_hidden_files_are_not(tmp_path: Path) -> None:
    for name in ("b.yml", "a.yaml", "inner/c.yaml", ".hidden.yaml", ".git/d.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(pool(name.strip(".").replace("/", "-").lower()))
    (tmp_path / "note.txt").write_text("nothing")
    flat = load.load_objects([str(tmp_path)])
    assert [i.obj.name for i in flat] == ["a.yaml", "b.yml"]
    deep = load.load_objects([str(tmp_path)], recursive=True)
    assert [i.obj.name for i in deep] == ["a.yaml", "b.yml", "inner-c.yaml"]


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(pool())
    assert len(load.load_objects([str(path), str(tmp_path), str(path)])) == 1


def test_files_folders_and_standard_input_together(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(pool("a"))
    objects = load.load_objects([str(tmp_path), "-"], stdin=BytesIO(pool("b").encode()))
    assert [item.obj.name for item in objects] == ["a", "b"]


def test_a_list_is_its_items() -> None:
    trees = [object_tree(item.obj) for item in read(deployment() + pool())]
    text = parser.dump({"apiVersion": "v1", "kind": "List", "items": [*trees]})
    assert [item.obj.name for item in read(text)] == ["qwen", "studio"]
    assert complaints(text.replace("replicas: 1", "replicas: -1")) == [
        ":13:15: ModelDeployment/qwen: spec.replicas: must be 0 or more, got -1 (an integer)"
    ]
    assert "unknown kind" in complaints(f"{text}more: 1\n")[-1]


def test_json_is_read_with_tabs_escapes_and_pairs_of_surrogates(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(
        '{\n\t"apiVersion":"fleet\\/v1alpha1",\n\t"kind": "ModelDeployment",\n'
        '\t"metadata": {"name": "a", "annotations": {"x": "\\ud83d\\ude00"}},\n'
        '\t"spec": {"model": {"path": "m"}, "replicas":2}\n}\n'
    )
    [item] = load.load_objects([str(path)])
    assert isinstance(item.obj, ModelDeployment)
    assert (item.obj.metadata.annotations, item.obj.spec.replicas) == ({"x": "😀"}, 2)


def test_a_byte_order_mark_and_windows_line_ends_are_accepted() -> None:
    raw = b"\xef\xbb\xbf" + deployment().replace("\n", "\r\n").encode()
    assert len(load.load_objects(["-"], stdin=BytesIO(raw))) == 1


def test_documents_before_a_syntax_error_are_still_validated() -> None:
    with pytest.raises(ManifestErrors) as caught:
        read(deployment(replicas=-1) + "---\na: [\n")
    assert len(caught.value.problems) == 2


def test_load_objects_equals_load_and_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(deployment() + pool())
    found = [load.read_objects(load.load_documents([str(path)])), load.load_objects([str(path)])]
    first, second = (
        [(loaded_object.obj, loaded_object.source, loaded_object.line) for loaded_object in loaded]
        for loaded in found
    )
    assert first == second
    path.write_text("a: [")
    with pytest.raises(ManifestErrors):
        load.load_documents([str(path)])
    path.write_text("a: 1")
    with pytest.raises(ManifestErrors):
        load.read_objects(load.load_documents([str(path)]))


def value(text: str) -> Tree:
    parsed = parser.parse(f"a: {text}\n", "f")
    assert parsed.problems == ()
    tree = nodes.plain_value(parsed.documents[0])
    assert isinstance(tree, dict)
    return tree["a"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no", "no"),
        ("on", "on"),
        ("y", "y"),
        ("True", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("null", None),
        ("012", 12),
        ("-7", -7),
        ("0x1F", 31),
        ("0o17", 15),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2026-01-01", "2026-01-01"),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        (".5", 0.5),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("'12'", "12"),
        ("!!str 12", "12"),
        ("=", "="),
        ("|\n  x\n  y\n", "x\ny\n"),
        ("&x [1]\nb: *x", [1]),
    ],
)
def test_unquoted_words_follow_the_yaml_1_2_core_schema(text: str, expected: Tree) -> None:
    found = value(text)
    assert (found, type(found)) == (expected, type(expected))


def test_nan_is_a_number() -> None:
    found = value(".nan")
    assert isinstance(found, float)
    assert math.isnan(found)


def test_an_alias_has_the_place_of_its_use() -> None:
    [root] = parser.parse("a: &x\n  b: 1\nc: *x\n*x2 : 1\n".replace("*x2 ", "d"), "f").documents
    assert nodes.plain_value(root) == {"a": {"b": 1}, "c": {"b": 1}, "d": 1}
    node = nodes.find_node(root, ("c",))
    assert node is not None
    assert (node.mark.line, node.mark.column) == (3, 4)


def test_an_alias_may_be_a_key() -> None:
    [root] = parser.parse("a: &x word\n*x : 1\n", "f").documents
    assert nodes.plain_value(root) == {"a": "word", "word": 1}


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
YAMLISH = st.text(st.sampled_from("a: -\n\t[]{}&*!|>%@`'\"#,?<~1.\\x0ué😀\r\u2028=+"))


@given(tree=st.dictionaries(st.text(), TREES, max_size=5))
@example(tree={"k" * 2000: [1, [2, {"a": []}]], "b": [[["x"]], {}], "": {"": ""}})
@example(tree={"a": "no", "b": "12:30", "c": "x: y", "d": "x #y", "e": " x", "f": "---", "g": "x:"})
@example(tree={"spec": 1, "apiVersion": "2"})
def test_a_dumped_tree_is_read_back(tree: dict[str, Tree]) -> None:
    text = parser.dump(tree)
    parsed = parser.parse(text, "f")
    assert parsed.problems == ()
    assert [nodes.plain_value(root) for root in parsed.documents] == [tree]


@given(tree=TREES.filter(lambda tree: tree is not None))
def test_any_tree_is_dumped_and_read_back(tree: Tree) -> None:
    [root] = parser.parse(parser.dump(tree), "f").documents
    assert nodes.plain_value(root) == tree


def never_surprised(raw: bytes) -> None:
    said = "\n".join(complaints(raw))
    assert "pydantic" not in said
    assert "Input should" not in said


@given(raw=st.binary() | st.text().map(str.encode) | YAMLISH.map(str.encode))
@example(raw=b'"\\U00110000"')
@example(raw=b'a: "\\ud800"')
@example(raw=b"%YAML 2.0\n---\n")
@example(raw=b"%TAG ! x\n")
def test_any_bytes_raise_manifest_errors_or_nothing(raw: bytes) -> None:
    never_surprised(raw)


@given(
    kind=st.sampled_from([kind.name for kind in kinds.KINDS]),
    metadata=TREES,
    spec=TREES | st.dictionaries(st.sampled_from(["model", "replicas", "nodes", "members"]), TREES),
    rest=st.dictionaries(st.text(), TREES, max_size=2),
)
def test_any_object_raises_manifest_errors_or_nothing(
    kind: str, metadata: Tree, spec: Tree, rest: dict[str, Tree]
) -> None:
    tree = {
        **rest,
        "apiVersion": "fleet/v1alpha1",
        "kind": kind,
        "metadata": metadata,
        "spec": spec,
    }
    never_surprised(parser.dump(tree).encode())


@given(edit=st.text(max_size=6), place=st.integers(0, 200), cut=st.integers(0, 12))
def test_a_typing_error_raises_manifest_errors_or_nothing(edit: str, place: int, cut: int) -> None:
    text = deployment(rest="  servedNames: [fast]\n  placement:\n    pools:\n    - studio\n")
    never_surprised((text[:place] + edit + text[place + cut :]).encode())


def test_dumped_fields_are_in_kubectls_order(golden: Golden) -> None:
    more = "  placement:\n    pools: [studio]\n    nodeSelector: {a/b: '1'}\n"
    [item] = read(deployment(rest=more))
    golden.check_text("manifests/dumped.yaml", parser.dump(object_tree(item.obj)))


NODE = """
apiVersion: fleet/v1alpha1
kind: Node
metadata: {name: mac-1, uid: u, labels: {fleet/node: mac-1, fleet/os: macOS, fleet/chip: Apple-M4, rack: "7", desk: a}}
"""
NODE_STATUS = 'status: {os: macOS, chip: Apple M4, labels: {rack: "7", desk: b}}\n'


def test_labels_that_get_adds_to_a_node_are_not_read_back() -> None:
    """A label whose value differs from the agent's (desk) belongs to the user."""
    (node,) = read(NODE + NODE_STATUS)
    assert node.obj.metadata.labels == {"desk": "a"}
    (said,) = read(NODE.replace("uid: u, ", ""))
    assert len(said.obj.metadata.labels) == 5
