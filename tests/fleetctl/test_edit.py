"""`fleetctl edit` with a scripted editor on a real store: what is shown, written, refused, and kept."""

import asyncio
import re
from pathlib import Path

import pytest

from schemas.deployment import ModelDeployment
from store import objects
from store.port import Transport
from tests.fleetctl.editing import ScriptedEditor
from tests.fleetctl.test_rollout import MANIFEST
from tests.support.fleet import Fleet
from tests.support.terminal import CTRL_C, ENTER, terminal

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedEditor:
    made = ScriptedEditor(tmp_path / "editor")
    monkeypatch.setenv("EDITOR", "false")
    monkeypatch.setenv("FLEETCTL_EDITOR", made.command)
    return made


async def applied(shared: Fleet, name: str) -> None:
    await shared.applied(MANIFEST.replace("NAME", name))


async def there(transport: Transport, name: str) -> ModelDeployment:
    found = await objects.get(transport, ModelDeployment, name)
    assert found is not None
    return found


async def test_edited(shared: Fleet, transport: Transport, editor: ScriptedEditor) -> None:
    await applied(shared, "one")
    editor.types("replicas: 2", "replicas: 3")
    done = await shared.ctl("edit", "md/one")
    assert (done.code, done.out, done.err) == (0, "modeldeployment/one edited\n", "")
    shown = editor.seen(1).splitlines()
    assert shown[0].startswith(
        '#| Edit below, save, and leave the editor. Lines that begin with "#|"'
    )
    assert shown[2:9] == [
        "#|", "apiVersion: fleet/v1alpha1", "kind: ModelDeployment", "metadata:", "  name: one",
        "spec:", "  model:",
    ]  # fmt: skip
    found = await there(transport, "one")
    assert (found.spec.replicas, found.metadata.generation) == (3, 2)
    [_, last] = found.metadata.managed_fields
    assert (last.manager, last.fields) == ("fleetctl-edit", ("spec.replicas",))


async def test_nothing_done(shared: Fleet, transport: Transport, editor: ScriptedEditor) -> None:
    await applied(shared, "same")
    before = await there(transport, "same")
    done = await shared.ctl("edit", "md", "same")
    assert (done.code, done.out) == (0, "Edit cancelled, no changes made.\n")
    editor.runs("")  # the opening that was
    editor.runs("echo '# only a comment' >> \"$1\"")
    said = await shared.ctl("edit", "md", "same")
    assert (said.code, said.out) == (0, "Edit cancelled, no changes made.\n")
    editor.runs(': > "$1"')
    empty = await shared.ctl("edit", "md", "same")
    assert (empty.code, empty.out) == (0, "Edit cancelled, saved file was empty.\n")
    assert await there(transport, "same") == before


async def test_what_is_wrong_opens_it_again(
    shared: Fleet, transport: Transport, editor: ScriptedEditor
) -> None:
    await applied(shared, "wrong")
    editor.types("replicas: 2", "replicas: many # why not").types("pools: ..", "pools: [gone]")
    editor.types("replicas: many", "replicas: 4").types("pools: .*", "pools: []")
    done = await shared.ctl("edit", "md/wrong")
    assert (done.code, done.out) == (0, "modeldeployment/wrong edited\n")
    second, third = editor.seen(2), editor.seen(3)
    assert "#| nothing was written, for this is not valid:\n" in second
    [line] = re.findall(r"#\| line (\d+): ModelDeployment/wrong: spec.replicas: expected", second)
    assert second.splitlines()[int(line) - 1] == "  replicas: many # why not"
    assert "expected an integer" in third
    assert "pools: [gone]" in third
    assert "for this does not go with what the fleet has:" in editor.seen(4)
    assert "there is no NodePool gone" in editor.seen(4)
    assert "replicas: 4 # why not" in editor.seen(4)
    assert (await there(transport, "wrong")).spec.replicas == 4


async def test_given_up(shared: Fleet, transport: Transport, editor: ScriptedEditor) -> None:
    await applied(shared, "lost")
    editor.types("concurrency: 4", "concurrency: 0")
    done = await shared.ctl("edit", "md/lost")
    assert (done.code, done.out) == (1, "")
    found = re.fullmatch(
        r"error: Edit cancelled, no valid changes were saved. A copy of your changes is in (.*)\n",
        done.err,
    )
    assert found is not None, done.err
    kept = Path(found[1])
    assert "concurrency: 0" in kept.read_text()
    kept.unlink()
    assert (await there(transport, "lost")).metadata.generation == 1


async def test_others_change_it_meanwhile(
    shared: Fleet, transport: Transport, editor: ScriptedEditor
) -> None:
    await applied(shared, "both")
    editor.runs(
        'sed "s|replicas: 2|replicas: 3|;s|concurrency: 4|concurrency: 8|" "$1" > "$1.n" && mv "$1.n" "$1"',
        waits=True,
    )
    editor.runs('sed "/^#|/d" "$1" > "$1.n" && mv "$1.n" "$1"', waits=True)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(shared.ctl("edit", "md/both"))
        await editor.opened(1)
        await shared.ctl("scale", "--replicas=5", "md/both")
        await shared.ctl("label", "md/both", "team=lab")
        editor.go(1)
        await editor.opened(2)
        again = editor.seen(2)
        editor.go(2)
    done = running.result()
    assert (done.code, done.out, done.err) == (0, "modeldeployment/both edited\n", "")
    assert "#| not written, for somebody else changed the same since this was opened:" in again
    assert (
        "ModelDeployment/both: spec.replicas: is 5 by now, set by fleetctl-scale; here it is 3. To write yours over"
        in again
    )
    found = await there(transport, "both")
    assert (found.spec.replicas, found.spec.concurrency) == (3, 8)
    assert found.metadata.labels == {"team": "lab"}


async def test_several(shared: Fleet, transport: Transport, editor: ScriptedEditor) -> None:
    for name in ("many-1", "many-2"):
        await applied(shared, name)
    editor.runs(
        'sed \'/name: many-2/,$s|priority: 0|priority: 7|\' "$1" > "$1.n" && mv "$1.n" "$1"'
    )
    done = await shared.ctl("edit", "md", "many-1", "many-2")
    assert done.out == "modeldeployment/many-1 skipped\nmodeldeployment/many-2 edited\n"
    assert (await there(transport, "many-1")).spec.priority == 0
    assert (await there(transport, "many-2")).spec.priority == 7
    editor.types("name: many-2", "name: many-3")
    renamed = await shared.ctl("edit", "md", "many-1", "many-2")
    assert renamed.code == 1
    assert "ModelDeployment/many-2: was taken out of the text" in editor.seen(3)
    assert "ModelDeployment/many-3: metadata.name: is none of what is edited" in editor.seen(3)
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
    shared: Fleet, transport: Transport, editor: ScriptedEditor, tmp_path: Path
) -> None:
    file = tmp_path / "filed.yaml"
    file.write_text(FILE)
    file.chmod(0o640)
    editor.types("replicas: 2", "replicas: two").types("replicas: two", "replicas: 3")
    done = await shared.ctl("edit", "-f", str(file))
    assert (done.code, done.out) == (0, f"{file} saved\nmodeldeployment/filed created\n")
    assert "#| line 13: ModelDeployment/filed: spec.replicas: expected an integer" in editor.seen(2)
    assert editor.seen(2).splitlines()[12] == "  replicas: two # see ticket 7"
    assert file.read_text() == FILE.replace("replicas: 2", "replicas: 3")
    assert file.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.glob(".filed*")) == []
    assert (await there(transport, "filed")).spec.replicas == 3
    again = await shared.ctl("edit", "-f", str(file))
    assert again.out == "Edit cancelled, no changes made.\n"


async def test_a_file_that_another_changed_is_left(
    shared: Fleet, editor: ScriptedEditor, tmp_path: Path
) -> None:
    file = tmp_path / "raced.yaml"
    file.write_text(FILE.replace("filed", "raced"))
    editor.runs(f"echo '# theirs' >> {file}; echo '# mine' >> \"$1\"")
    done = await shared.ctl("edit", "-f", str(file))
    assert done.code == 1
    assert "was changed by somebody else while it was edited; it is left as it is." in done.err
    assert file.read_text().endswith("# the end# theirs\n")
    Path(done.err.rpartition(" in ")[2].strip()).unlink()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("edit",), 2, "say which objects: KIND NAME..."),
        (("edit", "md"), 2, "which modeldeployments? Name them"),
        (("edit", "md", "nobody"), 1, 'modeldeployments "nobody" not found'),
        (("edit", "rep", "a"), 1, "replicas are written by the fleet; edit one of modeldeployments"),
        (("edit", "-f", "/nowhere.yaml"), 1, "/nowhere.yaml: does not exist"),
        (("edit", "-f", "/tmp"), 1, "/tmp: only files can be edited"),
        (("edit", "md/a", "-f", "x"), 2, "name objects, or files with -f, not both"),
        (("edit", "-f", "x", "-o", "json"), 2, "-o is the form of objects; a file has its own"),
    ],
)  # fmt: skip
async def test_refusals_teach(shared: Fleet, words: tuple[str, ...], code: int, said: str) -> None:
    done = await shared.ctl(*words)
    assert (done.code, done.out) == (code, "")
    assert said in done.err


async def test_editors_that_fail(shared: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await applied(shared, "editors")
    for command, said in (
        ("false", "error: the editor 'false' ended with code 1; nothing was changed\n"),
        ("no-such-editor -x", "error: the editor 'no-such-editor' cannot be started: No such file or directory. Say"),
        ("'", "error: the editor \"'\" is no command: No closing quotation\n"),
    ):  # fmt: skip
        monkeypatch.setenv("EDITOR", command)
        done = await shared.ctl("edit", "md/editors")
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith(said)


async def test_as_json(shared: Fleet, transport: Transport, editor: ScriptedEditor) -> None:
    await applied(shared, "jason")
    editor.types('"replicas": 2', '"replicas": 6')
    done = await shared.ctl("edit", "md/jason", "-o", "json")
    assert done.out == "modeldeployment/jason edited\n"
    assert (await there(transport, "jason")).spec.replicas == 6


async def test_at_a_terminal(shared: Fleet, transport: Transport, editor: ScriptedEditor) -> None:
    """The editor has the terminal: it reads what is typed, and Ctrl-C is its own."""
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
