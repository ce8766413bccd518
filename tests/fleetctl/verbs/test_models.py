"""`fleetctl models` on a folder of this machine: pull from the stand-in hub, list, check, pin, remove and import."""

import json
import tarfile
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from models.model_store.store import ModelStore
from tests.fleetctl.conftest import Golden
from tests.support.fleet import Done
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.hub import COMMIT, REPO, StandInHub, tiny_files
from tests.support.model_store import add_model, files_below
from tests.support.modelscope import StandInModelScope

NAME = "mlx-community--Tiny-4bit@1f2e3d4c5b6a"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


async def models(folder: Path, *words: str) -> Done:
    return await run_fleetctl("models", *words, "--models-dir", str(folder))


async def pull(folder: Path, hub: StandInHub, *words: str) -> Done:
    endpoint = ("--hub-endpoint", hub.endpoint)
    return await models(folder, "pull", REPO, "--to", "local", *endpoint, *words)


async def test_a_model_is_pulled_listed_checked_pinned_exported_and_removed(golden: Golden) -> None:
    async with StandInHub(repos={REPO: tiny_files()}).serve() as hub:
        await golden("worlds/models_local", HUB=hub.endpoint, HOST=hub.endpoint.partition("//")[2])


async def test_a_model_of_modelscope_is_pulled_and_a_malformed_endpoint_refused(
    folder: Path,
) -> None:
    async with StandInModelScope(repos={REPO: tiny_files()}).serve() as hub:
        where = ("--source", "modelscope", "--modelscope-endpoint")
        done = await models(folder, "pull", REPO, "--to", "local", *where, hub.endpoint)
        assert done.code == 0, done.err
        wrong = await models(folder, "pull", REPO, "--to", "local", *where, "ftp://x")
    assert (wrong.code, "--modelscope-endpoint: 'ftp://x' is no address" in wrong.err) == (2, True)
    (tree,) = json.loads((await models(folder, "list", "-o", "json")).out)["models"]
    assert files_below(Path(folder, tree["name"])).keys() < tiny_files().keys()


async def test_a_token_is_read_from_a_private_file(folder: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_x\n")
    token.chmod(0o600)
    async with StandInHub(repos={REPO: tiny_files()}, token="hf_x").serve() as hub:
        refused = await pull(folder, hub)
        assert refused.code == 1
        assert refused.err.startswith("error: Unauthorized: ")
        assert (await pull(folder, hub, "--hub-token-file", str(token))).code == 0
        token.chmod(0o644)
        opened = await pull(folder, hub, "--hub-token-file", str(token))
    assert opened.code == 1
    assert "chmod 600" in opened.err


async def test_a_damaged_model_is_found_and_only_its_damage_is_fetched_again(folder: Path) -> None:
    async with StandInHub(repos={REPO: tiny_files()}).serve() as hub:
        await pull(folder, hub)
        damaged = (folder / NAME / "tokenizer.json").resolve()
        damaged.chmod(0o644)
        damaged.write_bytes(b"x" * damaged.stat().st_size)
        done = await models(folder, "check", REPO, "--hash", "--discard")
        assert done.code == 1
        assert f"{NAME}/tokenizer.json: WrongContent: " in done.out
        assert f"{NAME} removed; fetch it again" in done.out
        before = hub.body_bytes
        assert (await pull(folder, hub)).code == 0
        assert hub.body_bytes - before == 5000


async def test_a_cache_of_another_program_is_imported(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"weights")
    done = await models(folder, "import", str(tmp_path / "hub"))
    assert (done.code, done.err) == (0, "")
    assert files_below(folder / "a--b@1f2e3d4c5b6a") == {"model.safetensors": b"weights"}
    absent = await models(folder, "import", str(tmp_path / "hub"), "--repo", "a/c")
    assert (absent.code, "has no a/c; expected a GGUF file, a cache" in absent.err) == (1, True)


async def test_a_pull_takes_large_files_from_an_import_of_lm_studio(
    folder: Path, tmp_path: Path
) -> None:
    files = tiny_files()
    for path, content in files.items():
        target = tmp_path / "lm-studio" / REPO / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    done = await models(folder, "import", str(tmp_path / "lm-studio"))
    assert (done.code, done.err) == (0, "")
    async with StandInHub(repos={REPO: files}).serve() as hub:
        assert (await pull(folder, hub)).code == 0
        assert not [one for one in hub.seen if one.path.endswith(".safetensors")]


async def test_a_model_is_exported_as_a_folder_and_as_a_tar_file(
    folder: Path, tmp_path: Path
) -> None:
    add_model(ModelStore(folder, SystemClock()), REPO, COMMIT, tiny_files())
    done = await models(folder, "export", REPO, str(tmp_path / "out"))
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{NAME} exported to {tmp_path / 'out'}, 396 KiB\n"
    assert files_below(tmp_path / "out") == tiny_files()
    assert (await models(folder, "export", NAME, str(tmp_path / "out.tar"))).code == 0
    with tarfile.open(tmp_path / "out.tar") as archive:
        assert f"{NAME}/config.json" in archive.getnames()
    again = await models(folder, "export", NAME, str(tmp_path / "out"))
    assert (again.code, "exists already" in again.err) == (1, True)
    unknown = await models(folder, "export", "org/none", str(tmp_path / "none"))
    assert (unknown.code, "fleetctl models list" in unknown.err) == (1, True)
