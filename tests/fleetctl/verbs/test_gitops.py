"""fleetctl beside a GitSource: a store in memory, a leading reconciler, and a real repository."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from store.port import Transport
from tests.support.fleetctl_editor import ScriptedEditor
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.gitrepo import Repository, deployment, pool
from tests.support.reconciler_gitops import leading

SOURCE = """\
apiVersion: fleet/v1alpha1
kind: GitSource
metadata:
  name: {name}
spec:
  repository: {url}
  interval: 24h
"""


@pytest.fixture(scope="module")
async def git(
    shared_fleet: MemoryFleet,
    shared_transport: Transport,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[MemoryFleet]:
    """Return the shared store with a leading reconciler; each test uses names of its own."""
    async with leading(shared_transport, tmp_path_factory.mktemp("leader")):
        yield shared_fleet


async def kept(git: MemoryFleet, repo: Repository, name: str, spec: str = "") -> None:
    """Apply a GitSource, and wait until its newest commit is applied."""
    await git.applied(SOURCE.format(name=name, url=repo.url) + spec)
    done = await git.ctl("sync", name)
    assert done.code == 0, done.err


async def field(git: MemoryFleet, name: str, *path: str) -> object:
    found = json.loads((await git.ctl("get", name, "-o", "json", "--show-managed-fields")).out)
    for part in path:
        found = found[part]
    return found


def chat(name: str, length: int) -> str:
    return deployment(name, more=f"  contextLength: {length}\n")


@pytest.mark.ci
async def test_an_apply_of_the_same_files_does_not_stall_the_source(
    git: MemoryFleet, tmp_path: Path
) -> None:
    repo = Repository(tmp_path / "same.git")
    repo.commit({"a.yaml": chat("same", 768)})
    await kept(git, repo, "same")
    done = await git.ctl("apply", "-f", "-", stdin=chat("same", 768).encode())
    assert (done.code, done.out) == (0, "modeldeployment/same unchanged\n")
    assert done.err == (
        "warning: modeldeployment/same is kept by gitsource/same, which restores its manifest; commit the change to "
        f"{repo.url} instead, or first run: fleetctl suspend gs/same\n"
    )
    entries = await field(git, "md/same", "metadata", "managedFields")
    assert isinstance(entries, list)
    assert [entry["manager"] for entry in entries] == ["gitsource/same"]
    repo.commit({"a.yaml": chat("same", 640)})
    synced = await git.ctl("sync", "same")
    assert synced.code == 0, synced.err
    assert await field(git, "md/same", "spec", "contextLength") == 640
    stale = await git.ctl("apply", "-f", "-", stdin=chat("same", 768).encode())
    assert stale.code == 1
    assert (
        "is 640, set by gitsource/same; the manifest says 768. Change it in the repository of gitsource/same"
        in stale.err
    )


@pytest.mark.ci
async def test_a_field_that_git_leaves_out_belongs_to_the_person_who_applies_it(
    git: MemoryFleet, tmp_path: Path
) -> None:
    repo = Repository(tmp_path / "own.git")
    repo.commit({"a.yaml": chat("own", 768)})
    await kept(git, repo, "own")
    more = chat("own", 768) + "  concurrency: 9\n"
    done = await git.ctl("apply", "-f", "-", stdin=more.encode())
    assert done.out == "modeldeployment/own configured\n"
    entries = await field(git, "md/own", "metadata", "managedFields")
    assert isinstance(entries, list)
    mine = [json.loads(e["applied"]) for e in entries if e["manager"] == "fleetctl"]
    assert [one["spec"] for one in mine] == [{"concurrency": 9}]
    repo.commit({"a.yaml": chat("own", 640)})
    assert (await git.ctl("sync", "own")).code == 0
    assert await field(git, "md/own", "spec", "concurrency") == 9
    # The manifest without the field gives it up.
    done = await git.ctl("apply", "-f", "-", stdin=chat("own", 640).encode())
    assert await field(git, "md/own", "spec", "concurrency") == "Auto"


@pytest.mark.ci
async def test_a_stalled_source_names_the_release_that_frees_it(
    git: MemoryFleet, tmp_path: Path
) -> None:
    await git.applied(chat("freed", 1024))
    repo = Repository(tmp_path / "freed.git")
    repo.commit({"a.yaml": chat("freed", 512)})
    await git.applied(SOURCE.format(name="freed", url=repo.url))
    stalled = await git.ctl("sync", "freed")
    assert stalled.code == 1
    assert "run: fleetctl apply --release modeldeployment/freed; to keep" in stalled.err
    done = await git.ctl("apply", "--release", "modeldeployment/freed")
    assert (done.code, done.out, done.err) == (0, "modeldeployment/freed released\n", "")
    again = await git.ctl("apply", "--release", "md/freed", "--field-manager=ci")
    assert again.out == "modeldeployment/freed has no fields of ci\n"
    synced = await git.ctl("sync", "freed")
    assert synced.code == 0, synced.err
    assert await field(git, "md/freed", "spec", "contextLength") == 512


@pytest.mark.ci
@pytest.mark.parametrize(
    ("words", "fields"),
    [
        pytest.param(("scale", "md/{}", "--replicas=2"), "spec.replicas", id="scale"),
        pytest.param(("patch", "md/{}", "-p", "spec:\n  replicas: 3"), "spec.replicas", id="patch"),
        pytest.param(
            ("label", "md/{}", "team=b", "--overwrite"), "metadata.labels.team", id="label"
        ),
        pytest.param(
            ("annotate", "md/{}", "owner=kim", "--overwrite"),
            "metadata.annotations.owner",
            id="annotate",
        ),
    ],
)
async def test_a_change_of_what_git_keeps_is_a_warning(
    git: MemoryFleet, tmp_path: Path, words: tuple[str, ...], fields: str
) -> None:
    name = f"warned-{words[0]}"
    repo = Repository(tmp_path / "warned.git")
    meta = f"  name: {name}\n  labels: {{team: a}}\n  annotations: {{owner: anna}}\n"
    repo.commit({"a.yaml": deployment(name).replace(f"  name: {name}\n", meta)})
    await kept(git, repo, name)
    for more in (("--dry-run=server",), ()):
        done = await git.ctl(*(word.format(name) for word in words), *more)
        assert done.code == 0, done.err
        assert done.err == (
            f"warning: {fields} of modeldeployment/{name} is kept by gitsource/{name}, which restores its manifest; "
            f"commit the change to {repo.url} instead, or first run: fleetctl suspend gs/{name}\n"
        )


@pytest.mark.ci
async def test_a_deletion_of_what_git_keeps_is_a_warning(git: MemoryFleet, tmp_path: Path) -> None:
    repo = Repository(tmp_path / "deleted.git")
    repo.commit({f"{name}.yaml": pool(f"deleted-{name}") for name in "ab"})
    await kept(git, repo, "deleted")
    await git.applied(pool("deleted-own"))
    own = await git.ctl("delete", "np/deleted-own")
    assert (own.code, own.err) == (0, "")
    text = (
        "warning: nodepool/deleted-a is kept by gitsource/deleted, which creates it again; remove its manifest from "
        f"{repo.url} first, or run: fleetctl suspend gs/deleted\n"
    )
    dry = await git.ctl("delete", "np/deleted-a", "--dry-run=server")
    assert (dry.out, dry.err) == ("nodepool/deleted-a deleted (server dry run)\n", text)
    done = await git.ctl("delete", "np/deleted-a")
    assert (done.out, done.err) == ("nodepool/deleted-a deleted\n", text)
    assert (await git.ctl("sync", "deleted")).code == 0
    assert (await git.ctl("get", "np/deleted-a")).code == 0
    assert (await git.ctl("suspend", "gs/deleted")).code == 0
    asleep = await git.ctl("delete", "np", "deleted-a", "deleted-b")
    assert asleep.err == (
        "warning: NodePool/deleted-a, NodePool/deleted-b are kept by gitsource/deleted, which is suspended: "
        "`fleetctl resume gs/deleted` creates them again\n"
    )
    assert (await git.ctl("resume", "gs/deleted")).code == 0
    assert (await git.ctl("sync", "deleted")).code == 0
    # Without the source, nothing creates its objects again.
    for more in (("--dry-run=client",), ()):
        both = await git.ctl("delete", "gs/deleted", "np/deleted-a", *more)
        assert (both.code, both.err) == (0, "")


@pytest.mark.ci
async def test_an_edit_of_what_git_keeps_is_a_warning(
    git: MemoryFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = Repository(tmp_path / "edited.git")
    repo.commit({"a.yaml": deployment("edited")})
    await kept(git, repo, "edited")
    editor = ScriptedEditor(tmp_path / "editor")
    monkeypatch.setenv("FLEETCTL_EDITOR", editor.command)
    editor.types("replicas: 1", "replicas: 3")
    done = await git.ctl("edit", "md/edited")
    assert done.out == "modeldeployment/edited edited\n"
    assert (
        "warning: spec.replicas of modeldeployment/edited is kept by gitsource/edited" in done.err
    )
    file = tmp_path / "edited.yaml"
    file.write_text(deployment("edited"))
    editor.types("replicas: 1", "replicas: 1  # as in Git")
    done = await git.ctl("edit", "-f", str(file))
    assert "warning: modeldeployment/edited is kept by gitsource/edited" in done.err


@pytest.mark.ci
async def test_a_suspended_source_is_listed_as_suspended(git: MemoryFleet, tmp_path: Path) -> None:
    repo = Repository(tmp_path / "asleep.git")
    first = repo.commit({"a.yaml": pool("asleep")})
    await kept(git, repo, "asleep")
    lines = (await git.ctl("get", "gs/asleep")).out.splitlines()
    assert lines[0].split() == ["NAME", "READY", "SUSPENDED", "STATUS", "REVISION", "AGE", "WHY"]
    assert lines[1].split()[:5] == ["asleep", "True", "False", "Applied", f"main@{first[:12]}"]
    await git.ctl("suspend", "gs/asleep")
    lines = (await git.ctl("get", "gs/asleep")).out.splitlines()
    assert lines[1].split()[:4] == ["asleep", "True", "True", "Suspended"]
    await git.ctl("resume", "gs/asleep")
    repo.commit({"a.yaml": "a: [b"})
    assert (await git.ctl("sync", "asleep")).code == 1
    lines = (await git.ctl("get", "gs/asleep", "-o", "wide")).out.splitlines()
    assert lines[1].split()[:4] == ["asleep", "False", "False", "BrokenManifests"]
    assert "is not YAML" in lines[1]


@pytest.mark.ci
async def test_commits_are_shown_with_author_and_subject(git: MemoryFleet, tmp_path: Path) -> None:
    repo = Repository(tmp_path / "who.git")
    repo.commit(
        {"a.yaml": pool("who")},
        message="longer \x1b[31mcontext\x07 " + "x" * 400 + "\n\nwhy",
        author="Anna \x1b]0;evil\x07 <anna@example.com>",
    )
    await kept(git, repo, "who")
    commit = await field(git, "gs/who", "status", "appliedCommit")
    assert isinstance(commit, dict)
    assert commit["author"] == "Anna ]0;evil"
    assert commit["subject"].startswith("longer [31mcontext xxx")
    assert len(commit["subject"]) == 200
    assert "Anna ]0;evil: longer" in (await git.ctl("get", "gs/who", "-o", "wide")).out
    described = (await git.ctl("describe", "gs/who")).out
    assert "AUTHOR" in described
    assert "Anna ]0;evil" in described


async def test_a_preview_shows_the_newest_commit_and_changes_nothing(
    git: MemoryFleet, tmp_path: Path
) -> None:
    repo = Repository(tmp_path / "seen.git")
    first = repo.commit({"a.yaml": pool("seen-a", priority=1), "b.yaml": pool("seen-b")})
    await kept(git, repo, "seen", "  prune: true\n")
    none = await git.ctl("diff", "gs/seen")
    assert (none.code, none.out, none.err) == (0, "", "")
    await git.ctl("suspend", "gs/seen")
    second = repo.commit(
        {"a.yaml": pool("seen-a", priority=2), "b.yaml": None, "c.yaml": pool("seen-c")}
    )
    dry = await git.ctl("sync", "--dry-run", "seen")
    assert (dry.code, dry.err) == (0, "")
    assert dry.out == (
        f"gitsource/seen main@{second}: 3 changes\n"
        "nodepool/seen-a configured (dry run)\n"
        "nodepool/seen-c created (dry run)\n"
        "nodepool/seen-b pruned (dry run)\n"
    )
    shown = await git.ctl("diff", "gs/seen")
    assert shown.code == 1
    assert "-  priority: 1\n+  priority: 2\n" in shown.out
    listed = await git.ctl("diff", "gs/seen", "-o", "json")
    assert listed.code == 1
    (source,) = json.loads(listed.out)["sources"]
    assert (source["source"], source["revision"]) == ("seen", f"main@{second}")
    assert (source["problem"], source["omitted"]) == ("", 0)
    assert [(one["change"], one["name"]) for one in source["changes"]] == [
        ("configured", "seen-a"), ("created", "seen-c"), ("pruned", "seen-b"),
    ]  # fmt: skip
    *changed, pruned = (one["diff"] for one in source["changes"])
    assert "".join(changed) + "NodePool/seen-b would be deleted\n" == shown.out
    assert pruned.startswith("--- NodePool/seen-b (now)\n+++ /dev/null\n")
    assert await field(git, "np/seen-a", "spec", "priority") == 1
    assert await field(git, "gs/seen", "status", "appliedRevision") == f"main@{first}"
    repo.commit({"a.yaml": "a: [b"})
    broken = await git.ctl("diff", "gs/seen")
    assert (broken.code, "a.yaml:1:6: is not YAML" in broken.err) == (2, True)
    dry = await git.ctl("sync", "--dry-run", "seen")
    assert (dry.code, "a.yaml:1:6: is not YAML" in dry.err) == (1, True)
    # Neither request nor preview stays behind.
    metadata = await field(git, "gs/seen", "metadata")
    assert "fleet/diff-requested" not in json.dumps(metadata)
    wrong = await git.ctl("diff", "np/seen-a")
    assert (wrong.code, "nodepools have no repository" in wrong.err) == (2, True)
