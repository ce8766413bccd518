"""The user's editor, on a file of ours: it has the terminal until it ends.

A user's own file in the editor: its text is kept as it is written, comments and all; once valid, saved and applied.

`fleetctl edit`: opens objects, or files, in the user's editor; what is wrong opens it again.
"""

import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError, InterruptedByUser
from fleetctl.objects import targets
from fleetctl.output.results import ResultPrinter
from fleetctl.verbs import edit_session
from fleetctl.verbs.edit_session import EditSession, RejectedError, load_text
from machinery.clock import Clock, SystemClock
from manifests import apply as applying
from manifests import sources
from manifests.errors import ApplyError, ManifestError, ManifestErrors
from manifests.load import LoadedObject
from schemas.meta import ApiObject
from store.codec import UndecodableError
from store.errors import StoreError
from store.port import Transport


class Editor:
    """A command that edits the file which is named to it last."""

    def __init__(self, command: str, suffix: str) -> None:
        self._words = _split_command(command)
        self._suffix = suffix

    def edited(self, text: str) -> str:
        """Open the text; return what it is when the editor has ended. Waits for a person, and as long as one likes.

        Raises:
            FleetctlError: the editor is not there, or did not end well; or what it left is no text.

        """
        with tempfile.TemporaryDirectory(prefix="fleetctl-edit-") as folder:
            path = Path(folder) / f"edit{self._suffix}"
            path.write_bytes(text.encode())
            self._run(path)
            try:
                return path.read_bytes().decode()
            except FileNotFoundError:
                return ""
            except UnicodeDecodeError as error:
                raise FleetctlError(
                    f"what {self._words[0]} left is not UTF-8; nothing was changed"
                ) from error

    def _run(self, path: Path) -> None:
        name = self._words[0]
        try:
            with _ignore_interrupts():
                code = subprocess.run([*self._words, str(path)], check=False).returncode
        except OSError as error:
            raise FleetctlError(
                f"the editor {name!r} cannot be started: {error.strerror}. Say which one to use with "
                "FLEETCTL_EDITOR or EDITOR, such as EDITOR=nano"
            ) from error
        if code:
            raise FleetctlError(f"the editor {name!r} ended with code {code}; nothing was changed")


def save_copy(text: str, suffix: str) -> Path:
    """Write down what the user wrote, so that a refusal does not lose it; return where."""
    number, name = tempfile.mkstemp(prefix="fleetctl-edit-", suffix=suffix)
    with os.fdopen(number, "wb") as file:
        file.write(text.encode())
    return Path(name)


def _split_command(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise FleetctlError(f"the editor {command!r} is no command: {error}") from error
    if not words:
        raise FleetctlError("the editor's command is empty; write such as EDITOR=nano")
    return words


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Leave Ctrl-C to the editor, which knows what it means there.

    By a handler of our own, which the editor does not inherit as it would that the signal is ignored.
    """

    def nothing(_: int, __: FrameType | None) -> None:
        return

    before: Callable[[int, FrameType | None], object] | int | None
    before = signal.signal(signal.SIGINT, nothing)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedFile:
    """A file as it was when it was opened."""

    path: Path
    text: str

    @classmethod
    def of(cls, name: str) -> "EditedFile":
        """Read a file.

        Raises:
            FleetctlError: it is none, or cannot be read or written.

        """
        path = Path(name)
        if name == sources.STDIN or path.is_dir():
            raise FleetctlError(f"{name}: only files can be edited; name each with its own -f")
        [(_, found)] = sources.read_all([name], recursive=False, stdin=None)
        if isinstance(found, ManifestError):
            raise FleetctlError(str(found))
        if not os.access(path, os.W_OK):
            raise FleetctlError(f"{name}: may not be written by you; see: ls -l {name}")
        return cls(path=path, text=found)

    @property
    def suffix(self) -> str:
        """What editors know the language by."""
        return self.path.suffix if self.path.suffix in (".yaml", ".yml", ".json") else ".yaml"

    async def save(self, transport: Transport, clock: Clock, text: str) -> None:
        """Check the text, save it as the file, and apply it; and say what became of the objects.

        The file first: were it the last, a power cut between them would leave a file that takes the change back.

        Raises:
            RejectedError: it is not valid; nothing was saved.
            FleetctlError: it was saved, and could not be applied; or it could not be saved.

        """
        loaded = load_text(text, self.suffix)
        try:
            await applying.prepare(transport, loaded, clock)
        except ManifestErrors as errors:
            head = "nothing was saved or written, for this does not go with what the fleet has:"
            raise RejectedError(head, errors.problems) from None
        self._replace(text)
        try:
            applied = await applying.apply(transport, loaded, clock)
        except (ManifestErrors, ApplyError, UndecodableError, StoreError) as error:
            raise FleetctlError(
                f"{self.path} is saved, and was not applied: {error}. Apply it: fleetctl apply -f {self.path}"
            ) from error
        click.echo(f"{self.path} saved")
        for outcome in applied.outcomes:
            click.echo(f"{outcome.obj.kind.lower()}/{outcome.obj.name} {outcome.result}")
        for clash in applied.kept_by_others:
            click.echo(f"warning: {clash.kept_message}", err=True)

    def _replace(self, text: str) -> None:
        """Put the text into the file's place, whole or not at all."""
        target = self.path.resolve()
        try:
            if target.read_bytes().decode(errors="replace") != self.text:
                raise FleetctlError(
                    f"{self.path} was changed by somebody else while it was edited; it is left as it is"
                )
            mode = target.stat().st_mode
            number, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
                Path(name).chmod(mode)
                Path(name).replace(target)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise FleetctlError(f"{self.path} cannot be written: {error.strerror}") from error


_HELP = """Change objects in your editor; what you save is checked, and written.

\b
  fleetctl edit md qwen
  fleetctl edit md/qwen np/studio
  EDITOR="code --wait" fleetctl edit md qwen -o json
  fleetctl edit -f qwen.yaml

The editor is what FLEETCTL_EDITOR says, else EDITOR, else vi. If what you saved is wrong, or somebody changed the same
meanwhile, it opens again and says so on top; saved unchanged, the edit ends. Only what you changed is written.

With -f it is your file that is edited, comments and all: once it is valid, it is saved and applied.
"""

_Save = Callable[[str], None]


@click.command(help=_HELP)
@click.argument("words", nargs=-1, metavar="[KIND NAME... | KIND/NAME...]")
@click.option(
    "-f", "--filename", "files", multiple=True, help="Edit this file, save it, and apply it."
)
@click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(["yaml", "json"]),
    help="The form of objects in the editor; yaml, unless it is said.",
)
@click.option(
    "--editor",
    envvar=["FLEETCTL_EDITOR", "EDITOR"],
    default="vi",
    show_default=True,
    help="The editor, with its flags.  [env: FLEETCTL_EDITOR, EDITOR]",
)
@targets.selector_option
@store_options
def edit(words: tuple[str, ...], files: tuple[str, ...], **options: Any) -> None:
    """Change objects in your editor; what you save is checked, and written."""
    if files:
        if words or options["selector"]:
            raise click.UsageError("name objects, or files with -f, not both")
        if options["form"]:
            raise click.UsageError("-o is the form of objects; a file has its own")
        for opened_file in [EditedFile.of(name) for name in files]:
            _edit_file(opened_file, options)
        return
    chosen = targets.parse_selections(words, {**options, "files": ()}, verb="edit", is_all=None)

    async def read() -> list[ApiObject]:
        async with open_store(options) as transport:
            return await targets.read_all_selected(transport, chosen)

    found = run(read())
    if found:
        _edit_objects(EditSession.of(found), options)


def _edit_objects(session: EditSession, options: dict[str, Any]) -> None:
    form = options["form"] or "yaml"
    results = ResultPrinter()

    def save(body: str) -> None:
        nonlocal session
        found = session.read(body, f".{form}")
        if not session.changed(found):
            raise _UnchangedError
        try:
            run(_write_session(session, found, results, options))
        except RejectedError as error:
            session = session.told(error.merges)
            raise

    _edit_until_saved(Editor(options["editor"], f".{form}"), session.text(form), f".{form}", save)


async def _write_session(
    session: EditSession, found: list[LoadedObject], results: ResultPrinter, options: dict[str, Any]
) -> None:
    async with open_store(options) as transport:
        await edit_session.write_changes(transport, SystemClock(), session, found, results)


def _edit_file(file: EditedFile, options: dict[str, Any]) -> None:
    def save(body: str) -> None:
        run(_apply_file(file, body, options))

    _edit_until_saved(Editor(options["editor"], file.suffix), file.text, file.suffix, save)


async def _apply_file(file: EditedFile, body: str, options: dict[str, Any]) -> None:
    async with open_store(options) as transport:
        await file.save(transport, SystemClock(), body)


class _UnchangedError(Exception):
    """What was saved says what the objects say already."""


def _edit_until_saved(editor: Editor, body: str, suffix: str, save: _Save) -> None:
    """Open the editor until what was saved could be written, or the user gave up.

    Raises:
        FleetctlError: the user gave up what was not valid, or the store refused it; a copy of it is kept.

    """
    notes: list[str] = list(edit_session.INSTRUCTIONS)
    was_refused = False
    while True:
        shown = edit_session.with_notes(notes, body)
        left = editor.edited(shown)
        if left == shown and was_refused:
            said = "Edit cancelled, no valid changes were saved"
            raise FleetctlError(f"{said}{_copy_note(body, suffix)}")
        before, body = body, edit_session.without_notes(notes, left)
        if body == before and not was_refused:
            click.echo("Edit cancelled, no changes made.")
            return
        if edit_session.is_empty(body):
            click.echo("Edit cancelled, saved file was empty.")
            return
        try:
            save(body)
        except _UnchangedError:
            click.echo("Edit cancelled, no changes made.")
        except RejectedError as error:
            notes, was_refused = edit_session.problem_notes(error.head, error.problems), True
            continue
        except InterruptedByUser as error:
            raise InterruptedByUser(f"interrupted{_copy_note(body, suffix)}") from error
        except FleetctlError as error:
            raise FleetctlError(f"{error.message.rstrip('.')}{_copy_note(body, suffix)}") from error
        return


def _copy_note(body: str, suffix: str) -> str:
    """Keep what the user wrote; return where, for the end of a refusal."""
    return f". A copy of your changes is in {save_copy(body, suffix)}"
