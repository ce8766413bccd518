"""Folders of cached prompts go with their deployments, and never before those are known."""

import asyncio
from pathlib import Path

from machinery.clock import SystemClock
from models.inspection import model_use
from nodeagent.engines.prefix_folders import PrefixFolders, needed_folders, remove_others
from schemas.kv_cache import KvCache
from schemas.model_use import ModelUse
from tests.support.waiting import until
from tests.support.world import deployment


def with_disk(name: str) -> ModelUse:
    plain = deployment(name=name)
    spec = plain.spec.model_copy(update={"kv_cache": KvCache(disk_bytes="1Gi")})
    return model_use(plain.model_copy(update={"spec": spec}), ())


def test_a_deployment_with_disk_bytes_needs_its_folder() -> None:
    assert needed_folders([with_disk("a"), model_use(deployment(name="b"), ())]) == {"a"}


def test_other_folders_are_removed_and_links_are_not_followed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "prefixes", tmp_path / "elsewhere"
    for folder in (root / "kept", root / "gone", elsewhere):
        folder.mkdir(parents=True)
        (folder / "x.kv").write_bytes(b"x")
    (root / "link").symlink_to(elsewhere)
    remove_others(root, {"kept"})
    assert sorted(path.name for path in root.iterdir()) == ["kept", "link"]
    assert (elsewhere / "x.kv").exists()
    remove_others(tmp_path / "none", set())


async def test_nothing_goes_before_the_deployments_are_known(tmp_path: Path) -> None:
    asked = 0

    def unknown() -> None:
        nonlocal asked
        asked += 1

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with asyncio.TaskGroup() as group:
        folders = PrefixFolders(tmp_path, unknown, SystemClock())
        running = group.create_task(folders.run())
        await until(lambda: asked)
        assert (tmp_path / "b").exists()
        running.cancel()
        known = PrefixFolders(tmp_path, lambda: [with_disk("a")], SystemClock())
        running = group.create_task(known.run())
        await until(lambda: not (tmp_path / "b").exists())
        assert (tmp_path / "a").exists()
        running.cancel()
