"""Tests of `manifests.sources` and of YAML errors: files that are not manifests, and the exact messages."""

import os
import time
from io import BytesIO
from pathlib import Path

import pytest

from manifests import load
from manifests.errors import ManifestErrors
from tests.support.golden_cases import Golden
from tests.support.manifests_texts import complaints, deployment

NOT_YAML = {
    "Text that is not YAML": [
        "a:\n\t- b\n",
        "a: b: c\n",
        "a: 'b\n",
        "a: [1, 2\n",
        "a: {",
        "a: @b\n",
        "- a\nb: c\n",
        'a: "\\q"\n',
        "a: 1\nb\n",
        "a: b\n\x00c: d\n",
        "[" * 100_000,
    ],
    "YAML that manifests do not have": [
        "a: 1\nb: 2\na: 3\n",
        "a: !!python/object:os.system x\n",
        "a: !!map {}\n",
        "a: *b\n",
        "a: &a [*a]\n",
        "a: &a {b: c}\nd:\n  <<: *a\n",
        "1: a\n",
        "? [a]\n: b\n",
        f"a: {'1' * 200}\n",
    ],
}


def not_an_object(found: list[str]) -> list[str]:
    """Leave out the validation problems of the tiny documents."""
    return [line for line in found if "apiVersion" not in line and ": kind:" not in line]


def test_messages_about_text_that_is_not_yaml(golden: Golden) -> None:
    sections = {
        title: [(text, not_an_object(complaints(text))) for text in texts]
        for title, texts in NOT_YAML.items()
    }
    golden.check("manifests/yaml_errors.txt", sections)


@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param(
            "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)),
            id="billion-laughs",
        ),
        pytest.param(f"a: &a {'x' * 1_000_000}\nb: [{','.join(['*a'] * 999)}]\n", id="long-text"),
        pytest.param("a: [" + "x," * 100_001 + "]\n", marks=pytest.mark.ci, id="no-alias-at-all"),
    ],
)  # fmt: skip
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
        pytest.param(b"a: b\nc: \xff\n", ": is not UTF-8: byte 0xff in line 2. Save it as UTF-8", id="latin"),
        pytest.param(b"", "", id="empty"),
        pytest.param(b"# only a comment\n---\n---\n", "", id="comments"),
        pytest.param(
            b"#" * (4 * 2**20 + 1), ": is too large for a manifest: more than 4,194,304 bytes. Split it into files", id="large",
        ),
    ],
)  # fmt: skip
def test_bytes_that_are_not_utf8_are_reported(raw: bytes, message: str) -> None:
    nothing = ": no object in it: it is empty, or has only comments"
    assert complaints(raw) == [message or nothing]


def refused(path: Path | str) -> str:
    with pytest.raises(ManifestErrors) as caught:
        load.load_objects([str(path)])
    return str(caught.value)


def test_files_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    """A FIFO and a device do not make it wait."""
    missing, broken, circle, fifo = (
        tmp_path / f"{name}.yaml" for name in ("no", "to", "self", "pipe")
    )
    broken.symlink_to(tmp_path / "gone")
    circle.symlink_to(circle)
    os.mkfifo(fifo)
    pipe = "Pipe it, and write - instead of its name"
    for path, message in (
        (missing, "does not exist"),
        (broken, "is a link to a missing file"),
        (circle, "cannot be read: Too many levels of symbolic links"),
        (fifo, f"is a FIFO, not a file. {pipe}"),
        ("/dev/zero", f"is a device or socket, not a file. {pipe}"),
        ("a\0b", "cannot be read: embedded null byte"),
    ):
        assert refused(path) == f"{path}: {message}"
    assert refused("-") == "standard input: is not open"


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


def test_an_empty_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.yaml").write_text(deployment())
    (tmp_path / "README.md").write_text("not a manifest")
    assert refused(tmp_path) == (
        f"{tmp_path}: is a folder without *.yaml, *.yml or *.json files. "
        "Folders inside it are read with --recursive"
    )


def test_no_sources_and_an_empty_folder_tree_are_errors(tmp_path: Path) -> None:
    empty = f"{tmp_path}: is a folder without *.yaml, *.yml or *.json files"
    nothing = "no file: no object in it: it is empty, or has only comments"
    for sources, message in (([str(tmp_path)], empty), ([], nothing)):
        with pytest.raises(ManifestErrors) as caught:
            load.load_objects(sources, stdin=BytesIO(), recursive=True)
        assert str(caught.value) == message
