"""The choice of files: what MLX needs, never code, and nothing from a list with one hostile path."""

import pytest

from models.hub.digests import BlobDigest
from models.hub.errors import ListingRefusedError
from models.hub.file_selection import select_files
from models.hub.model_hub import RemoteFile, check_repo, folder_name
from tests.support.hub import COMMIT, tiny_files

DIGEST = BlobDigest("git-sha1", "0" * 40)


def remote(path: str, size: int = 1) -> RemoteFile:
    return RemoteFile(path=path, size=size, digest=DIGEST)


def chosen(*paths: str, patterns: tuple[str, ...] | None = None) -> list[str]:
    files = [remote(path) for path in paths]
    remote_files = select_files(files) if patterns is None else select_files(files, patterns)
    return [file.path for file in remote_files]


def test_the_files_of_a_model_are_chosen_and_code_is_not() -> None:
    assert chosen(*tiny_files(), "tokenizer.py", "TOKENIZER_X.PY", "x.pkl") == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "templates/chat template #1.jinja",
        "tokenizer.json",
    ]


def test_own_patterns_replace_the_default_and_never_choose_code() -> None:
    paths = ("a.gguf", "b/c.txt", "b/d.txt", "run.py", "config.json")
    assert chosen(*paths, patterns=("*",)) == ["a.gguf", "b/c.txt", "b/d.txt", "config.json"]
    assert chosen(*paths, patterns=("b/c*",)) == ["b/c.txt"]


def test_a_repository_cannot_mark_its_model_as_partial() -> None:
    assert chosen("config.json", "partial-model.json", "a/partial-model.json") == [
        "a/partial-model.json",
        "config.json",
    ]
    assert chosen("config.json", "Partial-Model.json", patterns=("*",)) == ["config.json"]


@pytest.mark.parametrize("path", [
    "../config.json", "a/../../config.json", "/etc/config.json", "a//config.json", "./config.json",
    "", "C:/config.json", "a\\config.json", "con\x1b[2Jfig.json", "a\nb.json", "a\u202egnosj.json",
    "x" * 201 + ".json",
    "/".join("abcdefghi") + ".json",
    "nul\x00.json",
])  # fmt: skip
def test_one_unsafe_path_refuses_the_whole_list(path: str) -> None:
    with pytest.raises(ListingRefusedError, match="nothing of it is fetched"):
        chosen("config.json", path)


@pytest.mark.parametrize("paths", [
    ("config.json", "Config.json"),
    ("config.json", "config.json"),
    ("caf\u00e9.json", "cafe\u0301.json"),
    ("a/b.json", "A/B.json"),
])  # fmt: skip
def test_names_that_are_one_file_on_a_mac_are_refused(paths: tuple[str, str]) -> None:
    with pytest.raises(ListingRefusedError, match="one file on a Mac's disk"):
        chosen(*paths)


def test_a_file_that_is_also_a_folder_is_refused() -> None:
    with pytest.raises(ListingRefusedError, match="as a file and as the folder"):
        chosen("a.json/b.json", "A.json")


def test_absurd_sizes_and_numbers_are_refused() -> None:
    with pytest.raises(ListingRefusedError, match="at most"):
        select_files([remote("a.json", 3 << 40)])
    with pytest.raises(ListingRefusedError, match="at most"):
        select_files([remote(f"{number}.json", 2 << 40) for number in range(5)])
    with pytest.raises(ListingRefusedError, match="at most 10000"):
        select_files([remote(f"{number}.json") for number in range(10_001)])


def test_a_repository_without_a_model_says_so() -> None:
    with pytest.raises(ListingRefusedError, match="no model in MLX's format"):
        chosen("model.gguf", "README.md")


@pytest.mark.parametrize("patterns", [(), ("",), ("*" * 9,), ("a",) * 101])
def test_malformed_patterns_are_refused(patterns: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="pattern"):
        chosen("config.json", patterns=patterns)


@pytest.mark.parametrize(
    "repo", ["gpt2", "a/b/c", "../x", "a/..", "a--b/c", "a b/c", "/a", "a/", "-a/b"]
)
def test_a_name_that_is_no_repository_is_refused(repo: str) -> None:
    with pytest.raises(ValueError, match="expected ORGANISATION/NAME"):
        check_repo(repo)


def test_the_folder_of_a_commit_is_named_after_both() -> None:
    assert folder_name("mlx-community/Qwen3-8B", COMMIT) == "mlx-community--Qwen3-8B@1f2e3d4c5b6a"
    with pytest.raises(ValueError, match="40 hexadecimal"):
        folder_name("mlx-community/Qwen3-8B", "main")
