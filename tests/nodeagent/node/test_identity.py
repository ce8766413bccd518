"""Node identity: stable over restarts and lost state, distinct on cloned disks, with errors that say what to do."""

import json
import re
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.node import identity
from nodeagent.node.identity import Identity, IdentityError, dns_label, load_or_create
from tests.support.values import present

ONE = "6d9530a4-90a2-5a28-b133-3d6011cc7772"
OTHER = "d26e7bc6-425e-51c2-87c5-0b902782b60d"


def load(
    folder: Path, *, hardware: str = ONE, name: str | None = None, host: str = "Studio-A.local"
) -> Identity:
    return load_or_create(folder, hardware_uuid=hardware, name=name, hostname=host)


def test_a_first_start_makes_a_file_that_restarts_do_not_touch(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    made = load(folder, hardware=ONE.upper())
    assert (made.name, made.hardware_uuid, made.notice) == ("studio-a", ONE, None)
    file = folder / "identity.json"
    content = {"name": "studio-a", "uid": made.uid, "hardwareUuid": ONE}
    assert json.loads(file.read_text()) == content
    assert list(folder.iterdir()) == [file]
    written = file.stat().st_mtime_ns
    # A new host name does not rename the node, and a lost state folder gives the same one.
    assert load(folder, hardware=ONE.upper(), host="something-else") == made
    assert file.stat().st_mtime_ns == written
    assert load(tmp_path / "lost") == made


def test_the_uid_is_the_same_in_every_release_and_differs_by_name(tmp_path: Path) -> None:
    # Nodes in the field have these uids: changing the derivation orphans all of them.
    assert identity.uid_of(ONE, "studio-a") == "ccfe6168-c944-511a-be79-77b0ba516397"
    assert len({load(tmp_path / name, name=name).uid for name in ("node-1", "node-2")}) == 2


def test_a_cloned_disk_is_a_node_of_its_own(tmp_path: Path) -> None:
    first = load(tmp_path)
    clone = load(tmp_path, hardware=OTHER, host="studio-b")
    assert (clone.name, clone.hardware_uuid) == ("studio-b", OTHER)
    assert clone.uid != first.uid
    for words in (str(tmp_path / "identity.json"), ONE, OTHER, "studio-a", "cloned"):
        assert words in present(clone.notice)
    again = load(tmp_path, hardware=OTHER, host="studio-b")
    assert (again.uid, again.notice) == (clone.uid, None)


def test_another_name_for_this_state_folder_is_refused(tmp_path: Path) -> None:
    load(tmp_path, name="node-1")
    assert load(tmp_path, name="node-1").name == "node-1"
    with pytest.raises(IdentityError) as refused:
        load(tmp_path, name="node-2")
    for words in (str(tmp_path), '"node-1"', '"node-2"', "state folder of its own"):
        assert words in str(refused.value)
    assert load(tmp_path).name == "node-1"
    # But a cloned disk takes the name it is given.
    assert load(tmp_path, hardware=OTHER, name="node-2").name == "node-2"


@pytest.mark.parametrize("name", ["", "Mac Studio", "a.b", "-a", "a-", "ä", "a" * 64, "a\n"])
def test_a_name_that_cannot_be_one_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(IdentityError, match="try ") as refused:
        load(tmp_path, name=name)
    suggested = str(refused.value).rpartition('try "')[2].rstrip('"')
    assert load(tmp_path, name=suggested).name == suggested


def test_without_hardware_uuid_the_host_name_serves(tmp_path: Path) -> None:
    made = load(tmp_path / "a", hardware="")
    assert made.hardware_uuid == ""
    assert "Studio-A.local" in present(made.notice)
    assert load(tmp_path / "b", hardware="").uid == made.uid
    assert load(tmp_path / "c", hardware="", host="other").uid != made.uid
    renamed = load(tmp_path / "a", hardware="", host="other")
    assert (renamed.name, renamed.uid) == (made.name, made.uid)


def test_a_hardware_uuid_that_fails_once_does_not_make_another_node(tmp_path: Path) -> None:
    first = load(tmp_path)
    blind = load(tmp_path, hardware="")
    assert (blind.name, blind.uid, blind.hardware_uuid) == (first.name, first.uid, ONE)
    assert blind.notice is not None
    assert load(tmp_path) == first


def test_a_hardware_uuid_that_appears_later_is_taken_up(tmp_path: Path) -> None:
    blind = load(tmp_path, hardware="")
    seeing = load(tmp_path, host="renamed")
    assert (seeing.name, seeing.uid) == (blind.name, identity.uid_of(ONE, blind.name))
    assert blind.uid in present(seeing.notice)
    assert load(tmp_path).notice is None


@pytest.mark.parametrize("content", [
    b"", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000,
    b'{"name": "A B", "uid": "x", "hardwareUuid": "y"}',
    b'{"name": "a", "uid": "not-a-uuid", "hardwareUuid": "y"}',
    b'{"name": "a", "uid": 3, "hardwareUuid": "y"}',
    b'{"name": "a", "uid": "6d9530a4-90a2-5a28-b133-3d6011cc7772", "hardwareUuid": null}',
])  # fmt: skip
def test_a_damaged_file_is_refused_and_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.json"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match=r"damaged.*Expected.*Delete") as error:
        load(tmp_path)
    assert str(path) in str(error.value)
    assert path.read_bytes() == content


def test_a_file_or_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "identity.json").mkdir()
    with pytest.raises(IdentityError, match=r"could not be read.*Expected.*owner and mode"):
        load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match=re.escape(str(tmp_path / "file"))):
        load(tmp_path / "file")


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))  # the write fails in the middle
    try:
        with pytest.raises(IdentityError, match=r"could not be written.*Make room"):
            load(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    assert load(tmp_path).notice is None


@pytest.mark.parametrize(("hostname", "expected"), [
    ("Annas-MacBook-Pro.local", "annas-macbook-pro"), ("Änna's Mac.LOCAL.", "anna-s-mac"),
    ("build-7.example.com", "build-7-example-com"), ("a" * 62 + "--b", "a" * 62),
    ("localhost", "node-x"), ("...", "node-x"), ("名前", "node-x"), ("", "node-x"),
])  # fmt: skip
def test_label(hostname: str, expected: str) -> None:
    assert dns_label(hostname, fallback="node-x") == expected


@given(hostname=st.text(max_size=200) | st.from_regex(r"[A-Za-z0-9.\-_ ]{0,90}(\.local)?"))
def test_every_host_name_makes_a_label(hostname: str) -> None:
    made = dns_label(hostname, fallback="node-x")
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", made)
    assert dns_label(made, fallback="node-y") == made


@pytest.mark.parametrize("host", ["", "localhost", "名前"])
def test_machines_without_names_get_distinct_names(tmp_path: Path, host: str) -> None:
    names = {load(tmp_path / uid, hardware=uid, host=host).name for uid in (ONE, OTHER)}
    assert len(names) == 2
