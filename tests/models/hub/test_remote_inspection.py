"""Facts about a hub's model before it is fetched: they equal those of its folder afterwards."""

from dataclasses import replace
from pathlib import Path

import pytest

from models import inspection, model_files, partial_model, weight_headers
from models.hub.hub_settings import HubSettings
from models.hub.remote_inspection import (
    config_text,
    inspect_remote,
    snapshot_facts,
    snapshot_files,
    snapshot_weights,
)
from models.model_files import ModelUnusableError, PartBytes
from models.partial_model import AbsentFile, PartialMark
from schemas.deployment import HubReference
from schemas.model_snapshot import ModelSnapshot
from schemas.node import ModelReport
from tests.support.clock import FakeClock
from tests.support.hub import COMMIT, REPO, StandInHub
from tests.support.hub_repositories import FOLDER, servable_files


async def taken(hub: StandInHub) -> ModelSnapshot:
    source = HubReference(repo=REPO, endpoint=hub.endpoint)
    async with HubSettings().open() as factory:
        remote = await inspect_remote(factory(source, ""), REPO, COMMIT)
    return ModelSnapshot(
        deployment="tiny",
        uid="u",
        source=source,
        commit=COMMIT,
        resolved_at=FakeClock().now(),
        files=len(remote.files),
        size_bytes=remote.size_bytes,
        large_files=snapshot_files(remote.files),
        config=config_text(remote.config),
        weights=snapshot_weights(remote.weights),
        headers=remote.headers,
    )


async def test_a_snapshot_has_the_facts_of_the_folder(tmp_path: Path) -> None:
    files = servable_files()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    async with StandInHub(repos={REPO: files}).serve() as hub:
        snapshot = await taken(hub)
    assert snapshot_facts(snapshot) == model_files.inspect_model(tmp_path)
    assert snapshot.folder == FOLDER
    headers = weight_headers.unpack(snapshot.headers)
    assert headers.config == files["config.json"].decode()
    assert headers.weight_map == dict.fromkeys(("a", "b"), "model.safetensors")
    assert snapshot.size_bytes == sum(len(files[name]) for name in files if name != "README.md")


async def test_a_snapshot_has_the_bytes_of_experts_and_tables() -> None:
    async with StandInHub(repos={REPO: servable_files()}).serve() as hub:
        snapshot = await taken(hub)
    totals = replace(
        snapshot_facts(snapshot).weights, experts=PartBytes(9, 4), looked_up=PartBytes(5, 2)
    )
    moe = snapshot.model_copy(update={"weights": snapshot_weights(totals)})
    assert snapshot_facts(moe).weights == totals


async def test_a_node_reports_a_model_that_is_not_fetched_yet_as_it_reports_its_folder(
    tmp_path: Path,
) -> None:
    files = servable_files()
    async with StandInHub(repos={REPO: files}).serve() as hub:
        snapshot = await taken(hub)

    def report() -> ModelReport:
        [found] = inspection.report_models(
            (), tmp_path, casts_to_float32=False, snapshots={FOLDER: snapshot}
        )
        return found

    before = report()
    folder = tmp_path / FOLDER
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert before.missing_bytes == snapshot.size_bytes
    assert report() == before.model_copy(update={"missing_bytes": 0})
    # A part of it is judged as what is not fetched; as a folder it is refused.
    (folder / "model.safetensors").unlink()
    absent = {"model.safetensors": AbsentFile(size=1, sha256="0" * 64)}
    partial_model.write_mark(folder, PartialMark(absent=absent, headers=snapshot.headers))
    assert report() == before
    by_path = inspection.report_model(FOLDER, tmp_path, casts_to_float32=False)
    assert (by_path.reason, by_path.geometry) == ("ModelPartial", None)


@pytest.mark.parametrize(("name", "content", "words"), [
    ("config.json", None, "has no config.json"),
    ("config.json", b"[]", "config.json: content"),
    ("model.safetensors", None, r"has no model\*.safetensors"),
    ("model.safetensors", b"<html>" * 20, "is not a safetensors file"),
    ("config.json", b" " * (1 << 20) + b"{}", "at most 1048576 are read"),
])  # fmt: skip
async def test_a_repository_that_is_no_model_is_refused_without_a_fetch(
    name: str, content: bytes | None, words: str
) -> None:
    files = servable_files()
    if content is None:
        del files[name]
    else:
        files[name] = content
    async with StandInHub(repos={REPO: files}).serve() as hub:
        with pytest.raises(ModelUnusableError, match=words):
            await taken(hub)
