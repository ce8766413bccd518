"""Tests of `manifests.sources` and of YAML errors: files that are not manifests, and the exact messages."""

import os
import time
from io import BytesIO
from pathlib import Path

import pytest

from manifests import load
from manifests.errors import ManifestErrors
from tests.support.manifests_texts import complaints, deployment

NOT_YAML = [
    pytest.param(
        "a:\n\t- b\n",
        ":2:1: is not YAML: a tab stands where YAML wants spaces. Indent with spaces",
        id="tab",
    ),
    pytest.param(
        "a: b: c\n",
        ":1:5: is not YAML: a ':' stands where no field can begin. Look at the indentation of this "
        "line and the one above; quote a text that has ': ' in it",
        id="colon-in-text",
    ),
    pytest.param(
        "a: 'b\n",
        ":2:1: is not YAML: the file ends inside a quoted text. Close the quote",
        id="open-quote",
    ),
    pytest.param(
        "a: [1, 2\n",
        ":2:1: is not YAML: a bracket is not closed, or a ',' is missing. "
        "Close every [ and { and put ',' between their items",
        id="open-bracket",
    ),
    pytest.param(
        "a: {",
        ":1:5: is not YAML: the text ends, or a bracket closes, where a value should stand. "
        "Write the value, and close every [ and {",
        id="ends-early",
    ),
    pytest.param(
        "a: @b\n",
        ":1:4: is not YAML: a text cannot begin with @ unless it is quoted. "
        "Put it in double quotes",
        id="at",
    ),
    pytest.param(
        "- a\nb: c\n",
        ":2:1: is not YAML: this line does not belong to the block above. "
        "Look at its indentation: fields of one mapping begin in the same column",
        id="mixed-block",
    ),
    pytest.param(
        'a: "\\q"\n',
        ":1:6: is not YAML: an unknown escape stands in a text in double quotes. "
        "Use single quotes, in which a backslash is a backslash",
        id="escape",
    ),
    pytest.param(
        "a: 1\nb\n",
        ":3:1: is not YAML: a line that should be a field has no ':'. Write it as: name: value",
        id="no-colon",
    ),
    pytest.param(
        "a: b\n\x00c: d\n",
        ":2:1: is not YAML: the character U+0000 is not allowed in a text. "
        "Remove it; if the file is not text, this is the wrong file",
        id="nul",
    ),
    pytest.param(
        "a: 1\nb: 2\na: 3\n",
        ':3:1: "a" is given twice, first in line 1. Remove one of them',
        id="duplicate-key",
    ),
    pytest.param(
        "a: !!python/object:os.system x\n",
        ":1:4: the tag !!python/object:os.system is not allowed. "
        "Manifests hold plain values: remove it",
        id="tag",
    ),
    pytest.param(
        "a: !!map {}\n",
        ":1:4: the tag !!map is not allowed. Manifests hold plain values: remove it",
        id="tag-of-mapping",
    ),
    pytest.param(
        "a: *b\n",
        ":1:4: the alias *b has no complete anchor &b before it. "
        'Write "*b" in quotes if it is a text',
        id="alias-of-nothing",
    ),
    pytest.param(
        "a: &a [*a]\n",
        ":1:8: the alias *a has no complete anchor &a before it. "
        'Write "*a" in quotes if it is a text',
        id="alias-of-itself",
    ),
    pytest.param(
        "a: &a {b: c}\nd:\n  <<: *a\n",
        ":3:3: merge keys (<<) are not part of YAML 1.2. Write the fields out",
        id="merge-key",
    ),
    pytest.param(
        "1: a\n",
        ':1:1: a field\'s name must be a text, not 1. Write: "1":',
        id="integer-key",
    ),
    pytest.param(
        "? [a]\n: b\n",
        ":1:3: a field's name must be a text. Write it as: name: value",
        id="list-key",
    ),
    pytest.param(
        f"a: {'1' * 200}\n",
        ":1:4: is a number of 200 digits. Put it in double quotes if it is a text",
        id="number-beyond-measure",
    ),
    pytest.param(
        "[" * 100_000,
        ":1:65: is nested more than 64 levels deep. Reduce the nesting",
        id="deep",
    ),
]


def not_an_object(found: list[str]) -> list[str]:
    """Leave out the validation problems of the tiny documents."""
    return [line for line in found if "apiVersion" not in line and ": kind:" not in line]


@pytest.mark.parametrize(("text", "message"), NOT_YAML)
def test_text_that_is_not_yaml_is_reported(text: str, message: str) -> None:
    assert not_an_object(complaints(text)) == [message]


@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param(
            "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)),
            id="billion-laughs",
        ),
        pytest.param(f"a: &a {'x' * 1_000_000}\nb: [{','.join(['*a'] * 999)}]\n", id="long-text"),
        pytest.param("a: [" + "x," * 100_001 + "]\n", id="no-alias-at-all"),
    ],
)
def test_an_alias_bomb_is_refused_quickly(bomb: str) -> None:
    begun = time.process_time()
    [message] = not_an_object(complaints(bomb))
    assert message.endswith(
        ": the file holds more than 100,000 values, including those that aliases repeat. Split it into several files"
    )
    assert time.process_time() - begun < 20


def test_aliases_cannot_nest_deeper_than_brackets() -> None:
    text = "a0: &a0 " + "[" * 50 + "]" * 50 + "\n" + "a1: &a1 " + "[" * 50 + "*a0" + "]" * 50 + "\n"
    [message] = not_an_object(complaints(text))
    assert "nested more than 64 levels deep" in message


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        pytest.param("a: b".encode("utf-16"), ": is UTF-16, not UTF-8. Save it as UTF-8", id="16"),
        pytest.param(
            b"a: b\nc: \xff\n", ": is not UTF-8: byte 0xff in line 2. Save it as UTF-8", id="latin"
        ),
        pytest.param(b"", "", id="empty"),
        pytest.param(b"# only a comment\n---\n---\n", "", id="comments"),
        pytest.param(
            b"#" * (4 * 2**20 + 1),
            ": is too large for a manifest: more than 4,194,304 bytes. Split it into files",
            id="large",
        ),
    ],
)
def test_bytes_that_are_not_utf8_are_reported(raw: bytes, message: str) -> None:
    nothing = ": no object in it: it is empty, or has only comments"
    assert complaints(raw) == [message or nothing]


def refused(path: Path | str) -> str:
    with pytest.raises(ManifestErrors) as caught:
        load.load_objects([str(path)])
    return str(caught.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "nope.yaml"
    assert refused(path) == f"{path}: does not exist"


def test_a_broken_link_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "link.yaml"
    path.symlink_to(tmp_path / "gone")
    assert refused(path) == f"{path}: is a link to a missing file"


def test_a_link_to_itself_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "link.yaml"
    path.symlink_to(path)
    assert refused(path) == f"{path}: cannot be read: Too many levels of symbolic links"


def test_a_fifo_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "fifo.yaml"
    os.mkfifo(path)
    hint = "Pipe it, and write - instead of its name"
    assert refused(path) == f"{path}: is a FIFO, not a file. {hint}"


@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd"])
def test_a_pipe_that_the_shell_opened_is_read(folder: str) -> None:
    """Read a pipe, as with `fleetctl apply -f <(...)`."""
    if not Path(folder).exists():
        pytest.skip(f"this system has no {folder}")
    reading, writing = os.pipe()
    try:
        os.write(writing, deployment().encode())
        os.close(writing)
        (loaded_object,) = load.load_objects([f"{folder}/{reading}"])
        assert (loaded_object.obj.name, loaded_object.source) == ("qwen", f"{folder}/{reading}")
    finally:
        os.close(reading)


def test_a_link_in_a_folder_to_a_pipe_is_refused(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        path = tmp_path / "a.yaml"
        path.symlink_to(f"/dev/fd/{reading}")
        assert "is a FIFO, not a file" in refused(tmp_path)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_device_does_not_hang() -> None:
    hint = "Pipe it, and write - instead of its name"
    assert refused("/dev/zero") == f"/dev/zero: is a device or socket, not a file. {hint}"


def test_a_file_name_with_nul_is_reported() -> None:
    assert refused("a\0b") == "a\0b: cannot be read: embedded null byte"


def test_a_hundred_megabytes_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    path.touch()
    os.truncate(path, 100 * 2**20)
    begun = time.process_time()
    assert refused(path) == (
        f"{path}: is too large for a manifest: 104,857,600 bytes; the limit is 4,194,304 bytes. "
        "Split it into files"
    )
    assert time.process_time() - begun < 0.5


def test_an_endless_standard_input_is_not_read_to_its_end() -> None:
    with Path("/dev/zero").open("rb") as endless, pytest.raises(ManifestErrors) as caught:
        load.load_objects(["-"], stdin=endless)
    assert "standard input: is too large for a manifest: more than 4,194,304" in str(caught.value)


def test_a_closed_standard_input_is_reported() -> None:
    assert refused("-") == "standard input: is not open"


def test_an_empty_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.yaml").write_text(deployment())
    (tmp_path / "README.md").write_text("not a manifest")
    assert refused(tmp_path) == (
        f"{tmp_path}: is a folder without *.yaml, *.yml or *.json files. "
        "Folders inside it are read with --recursive"
    )


def test_an_empty_folder_tree_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ManifestErrors) as caught:
        load.load_objects([str(tmp_path)], recursive=True)
    expected = f"{tmp_path}: is a folder without *.yaml, *.yml or *.json files"
    assert str(caught.value) == expected


def test_no_sources_are_an_error() -> None:
    with pytest.raises(ManifestErrors) as caught:
        load.load_objects([], stdin=BytesIO())
    expected = "no file: no object in it: it is empty, or has only comments"
    assert str(caught.value) == expected
