"""fleetctl beside a GitSource: a store in memory, a leading reconciler, and a real repository."""

import json
from pathlib import Path

import pytest

from tests.fleetctl.conftest import Golden
from tests.support.fleetctl_editor import ScriptedEditor
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.gitrepo import Repository, deployment
from tests.support.reconciler_gitops import leading, source


@pytest.mark.ci
@pytest.mark.timeout(180)
async def test_commands_beside_a_source(fleet: MemoryFleet, tmp_path: Path, golden: Golden) -> None:
    repo = Repository(tmp_path / "repo.git")

    def commit(words: list[str], text: str) -> None:
        repo.commit({words[0]: text or None})

    async with leading(fleet.store, tmp_path / "leader"):
        await golden("worlds/gitops", fleet, {"commit": commit}, REPO=repo.url)


@pytest.mark.ci
async def test_an_edit_is_a_warning_and_a_hostile_commit_is_printed_without_its_escapes(
    fleet: MemoryFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = Repository(tmp_path / "edited.git")
    repo.commit(
        {"a.yaml": deployment("edited")},
        message="longer \x1b[31mcontext\x07 " + "x" * 400 + "\n\nwhy",
        author="Anna \x1b]0;evil\x07 <anna@example.com>",
    )
    editor = ScriptedEditor(tmp_path / "editor")
    monkeypatch.setenv("FLEETCTL_EDITOR", editor.command)
    async with leading(fleet.store, tmp_path / "leader"):
        await fleet.applied(source("edited", repo.url))
        assert (await fleet.ctl("sync", "edited")).code == 0
        editor.types("replicas: 1", "replicas: 3")
        done = await fleet.ctl("edit", "md/edited")
        assert "warning: spec.replicas of modeldeployment/edited is kept by gitsource" in done.err
        file = tmp_path / "edited.yaml"
        file.write_text(deployment("edited"))
        editor.types("replicas: 1", "replicas: 1  # as in Git")
        done = await fleet.ctl("edit", "-f", str(file))
        assert "warning: modeldeployment/edited is kept by gitsource/edited" in done.err
        tree = json.loads((await fleet.ctl("get", "gs/edited", "-o", "json")).out)
        commit = tree["status"]["appliedCommit"]
        assert commit["author"] == "Anna ]0;evil"
        assert commit["subject"].startswith("longer [31mcontext xxx")
        assert len(commit["subject"]) == 200
        assert "Anna ]0;evil: longer" in (await fleet.ctl("get", "gs/edited", "-o", "wide")).out
        assert "Anna ]0;evil" in (await fleet.ctl("describe", "gs/edited")).out
