"""Tests of `fleetctl node`: its arguments, and what it says before it connects to anything."""

from pathlib import Path

from tests.support.fleetctl_runner import MemoryFleet


async def test_add_needs_an_archive_that_is_one(fleet: MemoryFleet, tmp_path: Path) -> None:
    path = tmp_path / "notes.tar"
    path.write_text("notes")
    done = await fleet.ctl("node", "add", "me@mac-2.local", "--bundle", str(path))
    assert done.code == 1
    assert "cannot be read" in done.err


async def test_a_lost_node_is_removed_by_name(fleet: MemoryFleet) -> None:
    await fleet.ctl("apply", "-f", "-", stdin=b"apiVersion: fleet/v1alpha1\nkind: Node\nmetadata: {name: lost}\nspec: {}\n")  # fmt: skip
    done = await fleet.ctl("node", "remove", "lost", "--no-drain")
    assert done.code == 0, done.err
    assert "node/lost deleted" in done.out
    assert "the Mac itself was left alone" in done.err
    assert "lost" not in (await fleet.ctl("get", "nodes")).out
