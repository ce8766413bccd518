"""`fleetctl edit` with a scripted editor: what is shown, written, refused and kept."""

import asyncio
import re
from pathlib import Path

import pytest

from schemas.deployment import ModelDeployment
from store import objects
from store.port import Transport
from tests.support.fleet import Fleet
from tests.support.fleetctl_editor import ScriptedEditor
from tests.support.fleetctl_manifests import DEPLOYMENT
from tests.support.fleetctl_runner import CommandFleet, MemoryFleet
from tests.support.terminal import CTRL_C, ENTER, terminal

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedEditor:
    made = ScriptedEditor(tmp_path / "editor")
    monkeypatch.setenv("EDITOR", "false")
    monkeypatch.setenv("FLEETCTL_EDITOR", made.command)
    return made


async def applied(shared_fleet: CommandFleet, name: str) -> None:
    await shared_fleet.applied(DEPLOYMENT.replace("NAME", name))


async def there(shared_transport: Transport, name: str) -> ModelDeployment:
    obj = await objects.get(shared_transport, ModelDeployment, name)
    assert obj is not None
    return obj


async def test_the_editor_inherits_no_secret(
    shared_fleet: MemoryFleet,
    editor: ScriptedEditor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await applied(shared_fleet, "private")
    monkeypatch.setenv("FLEET_API_KEY", "canary-4711")
    monkeypatch.setenv("MY_TERMINAL", "seen")
    editor.runs(f'env > "{tmp_path}/env"')
    assert (await shared_fleet.ctl("edit", "md/private")).code == 0
    inherited = (tmp_path / "env").read_text()
    assert "MY_TERMINAL=seen" in inherited
    assert "canary-4711" not in inherited


async def test_an_edit_is_written(
    shared_fleet: MemoryFleet, shared_transport: Transport, editor: ScriptedEditor
) -> None:
    await applied(shared_fleet, "one")
    editor.types("replicas: 2", "replicas: 3")
    done = await shared_fleet.ctl("edit", "md/one")
    assert (done.code, done.out, done.err) == (0, "modeldeployment/one edited\n", "")
    shown = editor.seen(1).splitlines()
    assert shown[0].startswith(
        "#| Edit the text below, save, and close the editor. Lines at the top"
    )
    assert shown[2:9] == [
        "#|", "apiVersion: fleet/v1alpha1", "kind: ModelDeployment", "metadata:", "  name: one",
        "spec:", "  model:",
    ]  # fmt: skip
    deployment = await there(shared_transport, "one")
    assert (deployment.spec.replicas, deployment.metadata.generation) == (3, 2)
    [_, last] = deployment.metadata.managed_fields
    assert (last.manager, last.fields) == ("fleetctl-edit", ("spec.replicas",))


async def test_edits_without_changes(
    shared_fleet: MemoryFleet, shared_transport: Transport, editor: ScriptedEditor
) -> None:
    await applied(shared_fleet, "same")
    before = await there(shared_transport, "same")
    done = await shared_fleet.ctl("edit", "md", "same")
    assert (done.code, done.out) == (0, "Edit cancelled, no changes made.\n")
    editor.runs("")  # the opening that was
    editor.runs("echo '# only a comment' >> \"$1\"")
    said = await shared_fleet.ctl("edit", "md", "same")
    assert (said.code, said.out) == (0, "Edit cancelled, no changes made.\n")
    editor.runs(': > "$1"')
    empty = await shared_fleet.ctl("edit", "md", "same")
    assert (empty.code, empty.out) == (0, "Edit cancelled, saved file was empty.\n")
    assert await there(shared_transport, "same") == before


async def test_an_invalid_text_opens_the_editor_again(
    shared_fleet: MemoryFleet, shared_transport: Transport, editor: ScriptedEditor
) -> None:
    await applied(shared_fleet, "wrong")
    editor.types("replicas: 2", "replicas: many # why not").types("pools: ..", "pools: [gone]")
    editor.types("replicas: many", "replicas: 4").types("pools: .*", "pools: []")
    done = await shared_fleet.ctl("edit", "md/wrong")
    assert (done.code, done.out) == (0, "modeldeployment/wrong edited\n")
    second, third = editor.seen(2), editor.seen(3)
    assert "#| nothing was written because the text is invalid:\n" in second
    [line] = re.findall(r"#\| line (\d+): ModelDeployment/wrong: spec.replicas: expected", second)
    assert second.splitlines()[int(line) - 1] == "  replicas: many # why not"
    assert "expected an integer" in third
    assert "pools: [gone]" in third
    assert "because of these problems:" in editor.seen(4)
    assert "there is no NodePool gone" in editor.seen(4)
    assert "replicas: 4 # why not" in editor.seen(4)
    assert (await there(shared_transport, "wrong")).spec.replicas == 4


async def test_cancelling_an_invalid_text_keeps_a_copy(
    shared_fleet: MemoryFleet, shared_transport: Transport, editor: ScriptedEditor
) -> None:
    await applied(shared_fleet, "lost")
    editor.types("concurrency: Auto", "concurrency: 0")
    done = await shared_fleet.ctl("edit", "md/lost")
    assert (done.code, done.out) == (1, "")
    found = re.fullmatch(
        r"error: Edit cancelled, nothing was written because the text is invalid:\n"
        r"(line \d+: ModelDeployment/lost: spec.concurrency: .*)\. A copy of your changes is in (.*)\n",
        done.err,
    )
    assert found is not None, done.err
    path = Path(found[2])
    assert "concurrency: 0" in path.read_text()
    assert f"#| {found[1]}" in path.read_text()
    path.unlink()
    assert (await there(shared_transport, "lost")).metadata.generation == 1


async def test_conflicting_changes_of_others_are_shown(
    shared_fleet: MemoryFleet, shared_transport: Transport, editor: ScriptedEditor
) -> None:
    await applied(shared_fleet, "both")
    editor.runs(
        'sed "s|replicas: 2|replicas: 3|;s|concurrency: Auto|concurrency: 8|" "$1" > "$1.n" && mv "$1.n" "$1"',
        waits=True,
    )
    editor.runs('sed "/^#|/d" "$1" > "$1.n" && mv "$1.n" "$1"', waits=True)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(shared_fleet.ctl("edit", "md/both"))
        await editor.opened(1)
        await shared_fleet.ctl("scale", "--replicas=5", "md/both")
        await shared_fleet.ctl("label", "md/both", "team=lab")
        editor.go(1)
        await editor.opened(2)
        again = editor.seen(2)
        editor.go(2)
    done = running.result()
    assert (done.code, done.out, done.err) == (0, "modeldeployment/both edited\n", "")
    assert (
        "#| nothing was written because another writer changed the same fields meanwhile:" in again
    )
    assert (
        "ModelDeployment/both: spec.replicas: is now 5, set by fleetctl-scale; your value is 3. To overwrite it"
        in again
    )
    deployment = await there(shared_transport, "both")
    assert (deployment.spec.replicas, deployment.spec.concurrency) == (3, 8)
    assert deployment.metadata.labels == {"team": "lab"}


async def test_several_objects(
    shared_fleet: MemoryFleet, shared_transport: Transport, editor: ScriptedEditor
) -> None:
    for name in ("many-1", "many-2"):
        await applied(shared_fleet, name)
    editor.runs(
        'sed \'/name: many-2/,$s|priority: 0|priority: 7|\' "$1" > "$1.n" && mv "$1.n" "$1"'
    )
    done = await shared_fleet.ctl("edit", "md", "many-1", "many-2")
    assert done.out == "modeldeployment/many-1 skipped\nmodeldeployment/many-2 edited\n"
    assert (await there(shared_transport, "many-1")).spec.priority == 0
    assert (await there(shared_transport, "many-2")).spec.priority == 7
    editor.types("name: many-2", "name: many-3")
    renamed = await shared_fleet.ctl("edit", "md", "many-1", "many-2")
    assert renamed.code == 1
    assert "ModelDeployment/many-2: was removed from the text" in editor.seen(3)
    assert "ModelDeployment/many-3: metadata.name: is not one of the edited objects" in editor.seen(
        3
    )
    Path(renamed.err.rpartition(" in ")[2].strip()).unlink()


FILE = """\
# Our model.  It answers questions.

apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: filed}   # a name
spec:
  model:   {path: small}
  replicas: 2 # see ticket 7
# the end"""


async def test_a_file_keeps_its_comments(
    shared_fleet: MemoryFleet, shared_transport: Transport, editor: ScriptedEditor, tmp_path: Path
) -> None:
    file = tmp_path / "filed.yaml"
    file.write_text(FILE)
    file.chmod(0o640)
    editor.types("replicas: 2", "replicas: two").types("replicas: two", "replicas: 3")
    done = await shared_fleet.ctl("edit", "-f", str(file))
    assert (done.code, done.out) == (0, f"{file} saved\nmodeldeployment/filed created\n")
    assert "#| line 13: ModelDeployment/filed: spec.replicas: expected an integer" in editor.seen(2)
    assert editor.seen(2).splitlines()[12] == "  replicas: two # see ticket 7"
    assert file.read_text() == FILE.replace("replicas: 2", "replicas: 3")
    assert file.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.glob(".filed*")) == []
    assert (await there(shared_transport, "filed")).spec.replicas == 3
    again = await shared_fleet.ctl("edit", "-f", str(file))
    assert again.out == "Edit cancelled, no changes made.\n"


async def test_a_file_that_changed_meanwhile_is_not_saved(
    shared_fleet: MemoryFleet, editor: ScriptedEditor, tmp_path: Path
) -> None:
    file = tmp_path / "raced.yaml"
    file.write_text(FILE.replace("filed", "raced"))
    editor.runs(f"echo '# theirs' >> {file}; echo '# mine' >> \"$1\"")
    done = await shared_fleet.ctl("edit", "-f", str(file))
    assert done.code == 1
    assert "was changed by another program while it was edited; it was not saved." in done.err
    assert file.read_text().endswith("# the end# theirs\n")
    Path(done.err.rpartition(" in ")[2].strip()).unlink()


async def test_editors_that_fail(
    shared_fleet: MemoryFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await applied(shared_fleet, "editors")
    for command, said in (
        ("false", "error: the editor 'false' ended with code 1; nothing was changed\n"),
        ("no-such-editor -x", "error: the editor 'no-such-editor' cannot be started: No such file or directory. Choose"),
        ("'", "error: the editor \"'\" is not a valid command: No closing quotation\n"),
    ):  # fmt: skip
        monkeypatch.setenv("EDITOR", command)
        done = await shared_fleet.ctl("edit", "md/editors")
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith(said)


async def test_at_a_terminal(shared: Fleet, transport: Transport, editor: ScriptedEditor) -> None:
    """The editor owns the terminal: it reads the input, and Ctrl-C reaches only it."""
    await applied(shared, "typed")
    editor.runs(
        "trap 'echo noted' INT; test -t 0 && test -t 1 && echo 'how many?'; "
        "read -r n || read -r n; "
        'sed "s|replicas: 2|replicas: $n|" "$1" > "$1.new" && mv "$1.new" "$1"'
    )
    async with terminal("edit", "md/typed", "--etcd", str(shared.etcd.address)) as shown:
        await shown.until("how many?")
        shown.type(CTRL_C)
        await shown.until("noted")
        shown.type(f"7{ENTER}")
        await shown.until("modeldeployment/typed edited\r\n")
        assert await shown.ended() == 0
    assert (await there(transport, "typed")).spec.replicas == 7
