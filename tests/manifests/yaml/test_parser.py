"""YAML is read by two parsers, the fast one for what both read alike: it must never say another thing.

Fuzzing found what is tried first here. A text in which they differ belongs to `parser._OTHER_SIGNS` and its neighbours.
"""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests import load
from manifests.documents import Document
from manifests.errors import ManifestErrors
from manifests.trees import Tree
from manifests.yaml import core_schema, parser
from manifests.yaml.builder import MAX_DEPTH
from manifests.yaml.nodes import plain_value
from tests.support.manifests_texts import HEAD, deployment, pool
from tests.support.sampling import samples

EXAMPLES = Path(__file__).parents[3] / "examples" / "manifests"

_PIECES = (
    *("a", "b c", "0", "-1", "1.5", "~", "null", "true", "<<", "''", '""', '"a"', "'b'", "k: ", "? "),
    *('"\\n"', '"\\/"', '"\\x41"', '"\\u00e9"', "é", "😀", "#", " # c", "---", "...", "-", "- ", ": "),
    *(":", ",", "[", "]", "{", "}", "&a ", "*a", "!", "!!str ", "|", "|-", ">", ">+1", "%", "@", "`"),
    *("\\", "\n", "\n", "\n", " ", "  ", "    ", "\t", "\r\n", '"k":1', "--- a", "\n---\n", "\n  ", "::"),
    *("a:b", "http://x", "\xa0", "\u2028", "k: |\n  t\n", "k: >\n  t\n\n   u\n", "k:\n- a\n- b\n"),
)  # fmt: skip
_fragments = st.lists(st.sampled_from(_PIECES), max_size=6).map("".join)
_starts = st.sampled_from(
    ("k: ", "j: ", "- ", "  i: ", "    - ", "- x: ", "{", "[", '"q": ', "r: [", "")
)
_lines = st.builds(lambda start, rest: f"{start}{rest}\n", _starts, _fragments)
_texts = st.one_of(_fragments, st.lists(_lines, max_size=6).map("".join))


def both(text: str) -> None:
    fast = parser.parse_values(text)
    slow = parser._parse_slowly(text, "f")
    # With places, the result is the same to the letter, whichever library reads the text.
    assert repr(parser.parse(text, "f")) == repr(slow)
    if fast is None:
        return
    assert slow.problems == ()
    # Compare by repr: NaN != NaN, and True == 1.
    assert repr([plain_value(root) for root in slow.documents]) == repr(fast)


@settings(max_examples=samples(100), deadline=None)
@given(_texts)
def test_both_readers_return_the_same_values(text: str) -> None:
    both(text)


_plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec="utf-8"))
)
_values = st.recursive(
    _plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=samples(60), deadline=None)
@given(st.dictionaries(st.text(max_size=8), _values, min_size=1, max_size=4))
def test_both_readers_read_back_a_dumped_tree(tree: Tree) -> None:
    both(core_schema.dump(tree))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('["k":1]\n', id="a-pair-without-braces"),
        pytest.param("k: |#c\n", id="a-comment-that-is-none"),
        pytest.param("k: >-\n  \n    \n", id="blank-lines-before-a-block"),
        pytest.param("|-\n---\na: b\n", id="a-block-as-a-document"),
        pytest.param("a: b\n...\n\n...\n", id="two-ends"),
        pytest.param("%YAML 1.1\n---\na: on\n", id="a-directive"),
        pytest.param("a: 'x\u2028y'\n", id="line-separators"),
        pytest.param("a: b\r\n", id="windows"),
        pytest.param("a: &x 1\nb: *x\n", id="aliases"),
        pytest.param("a: !!str 1\n", id="tags"),
        pytest.param("a: 1\na: 2\n", id="twice"),
        pytest.param("1: a\n", id="a-number-as-a-name"),
        pytest.param("<<: {a: 1}\n", id="merge"),
        pytest.param("? [a]\n: b\n", id="a-list-as-a-name"),
        pytest.param("a: b: c\n", id="broken"),
        pytest.param("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), id="deep"),
        pytest.param(f"a: {'1' * 101}\n", id="endless-number"),
        pytest.param("just a text\n", id="no-mapping"),
    ],
)
def test_texts_beyond_the_fast_reader_are_left_to_the_builder(text: str) -> None:
    assert parser.parse_values(text) is None


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_fast_reader_reads_every_example(path: Path) -> None:
    assert parser.parse_values(path.read_text()) is not None
    both(path.read_text())


def test_places_are_found_on_demand() -> None:
    text = "# first\n---\n---\n" + deployment("a", rest="  replica: 2\n") + pool("p") + pool("p")
    with pytest.raises(ManifestErrors) as caught:
        load.read_objects(_documents(text))
    assert [(problem.line, problem.column, problem.path) for problem in caught.value.problems] == [
        (13, 3, "spec.replica"),
        (25, 3, "metadata.name"),
    ]


def _documents(text: str) -> list[Document]:
    texts = load._read_texts([("f.yaml", text)])
    assert texts.problems == ()
    return list(texts.documents)


def test_files_of_both_readers_can_be_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(deployment("a"))
    (tmp_path / "b.yaml").write_text(
        f"{HEAD}kind: NodePool\nmetadata: {{name: &n b}}\nspec: {{nodes: [*n]}}\n"
    )
    listed = "  ".join(pool("c").removeprefix("---\n").splitlines(keepends=True))
    (tmp_path / "c.yaml").write_text(f"kind: List\nitems:\n- {listed}")
    loaded = load.load_objects([str(tmp_path)])
    assert [
        (loaded_object.obj.name, Path(loaded_object.source).name, loaded_object.line)
        for loaded_object in loaded
    ] == [
        ("a", "a.yaml", 2),
        ("b", "b.yaml", 1),
        ("c", "c.yaml", 3),
    ]
