"""`fleetctl models import`: what other programs keep in their usual folders is listed, chosen by name, and taken over."""

import json
from pathlib import Path

import pytest

from tests.support.fleet import Done
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.gguf_files import write_gguf
from tests.support.hub import COMMIT
from tests.support.model_folders import safetensors
from tests.support.ollama_store import GGUF, TENSOR, add_blob, add_jsons, add_manifest

CONFIG = b'{"model_type": "llama"}'


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture
def home(tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home folder with models of three programs; that of llama3 is damaged."""
    path = tmp_path / "home"
    monkeypatch.setenv("HOME", str(path))
    for name in ("HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    cache = path / ".cache/huggingface/hub/models--a--cached/snapshots" / COMMIT
    put(cache / "model.safetensors", bytes(5000))
    put(path / ".lmstudio/models/a/studio/model.safetensors", bytes(3000))
    gguf = path / ".lmstudio/models/a/studio-GGUF"
    put(gguf / "mmproj-tiny.gguf", b"GGUF")
    write_gguf(gguf / "tiny-Q8_0.gguf", models_dir / "tiny", "Q8_0")
    ollama = path / ".ollama/models"
    tensor = add_blob(ollama, TENSOR, "a", safetensors({"a": ("F32", 0, 4000)}))
    jsons = add_jsons(ollama, {"config.json": CONFIG})
    add_manifest(ollama, "library/tiny/latest", [tensor, *jsons])
    add_manifest(ollama, "library/llama3/8b", [add_blob(ollama, GGUF, "", b"GGUF")])
    return path


async def models(folder: Path, *words: str) -> Done:
    return await run_fleetctl("models", *words, "--models-dir", str(folder))


async def stored(folder: Path) -> set[str]:
    tree = json.loads((await models(folder, "list", "-o", "json")).out or '{"models": []}')
    return {one["repo"] for one in tree["models"]}


async def test_without_a_name_everything_is_listed_and_nothing_imported(
    home: Path, tmp_path: Path
) -> None:
    assert home.is_dir()
    done = await models(tmp_path / "models", "import")
    assert (done.code, done.err) == (0, "")
    title, *rows = done.out.splitlines()
    assert title.split() == ["PROGRAM", "NAME", "SIZE", "IMPORT"]
    found = {row.split("  ")[0] + " " + row.split()[-1] for row in rows if row.endswith(" yes")}
    assert found == {"Hugging Face yes", "LM Studio yes", "Ollama yes"}
    names = {word for row in rows for word in row.split() if "GGUF" in word}
    assert names == {"a/studio-GGUF/tiny-Q8_0.gguf"}
    assert not (tmp_path / "models").exists()


async def test_all_that_can_be_imported_is_imported(home: Path, tmp_path: Path) -> None:
    done = await models(tmp_path / "models", "import", "--all")
    assert done.code == 1
    assert done.err.startswith("llama3:8b refused: ")
    assert done.err.count(" refused: ") == 1
    known = {"a/cached", "a/studio", "fleet/tiny-Q8_0", "ollama/tiny"}
    assert await stored(tmp_path / "models") == known
    assert (home / ".lmstudio/models/a/studio/model.safetensors").read_bytes() == bytes(3000)


async def test_models_are_chosen_by_name(home: Path, tmp_path: Path) -> None:
    assert home.is_dir()
    folder = tmp_path / "models"
    done = await models(folder, "import", "tiny", "a/studio")
    assert (done.code, done.err) == (0, "")
    assert await stored(folder) == {"a/studio", "ollama/tiny"}
    refused = await models(folder, "import", "llama3:8b")
    assert (refused.code, "behind the end of the file" in refused.err) == (1, True)
    absent = await models(folder, "import", "a/other")
    assert (absent.code, "no program here has a/other" in absent.err) == (1, True)
    both = await models(folder, "import", "tiny", "--all")
    assert (both.code, "not both" in both.err) == (2, True)


async def test_a_folder_of_the_settings_of_lm_studio_is_found(home: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "disk"
    put(elsewhere / "a/other/model.safetensors", bytes(10))
    settings = json.dumps({"downloadsFolder": str(elsewhere)})
    (tmp_path / "studio").mkdir()
    (tmp_path / "studio/settings.json").write_text(settings)
    (home / ".lmstudio-home-pointer").write_text(f"{tmp_path / 'studio'}\n")
    done = await models(tmp_path / "models", "import")
    assert "a/other" in done.out


async def test_an_empty_home_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    done = await models(tmp_path / "models", "import")
    assert (done.code, done.out) == (0, "")
    assert "name a folder to look into" in done.err


async def test_a_gguf_file_is_named_by_its_path_and_a_folder_of_them_as_a_whole(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / ".lmstudio/models/a/studio-GGUF"
    monkeypatch.chdir(folder)
    done = await models(tmp_path / "models", "import", "tiny-Q8_0.gguf")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("fleet--tiny-Q8_0@")
    repeated = await models(tmp_path / "models", "import", str(folder))
    assert repeated.out == done.out
    assert await stored(tmp_path / "models") == {"fleet/tiny-Q8_0"}
    absent = await models(tmp_path / "models", "import", "./absent.gguf")
    assert (absent.code, "expected a GGUF file" in absent.err) == (1, True)
