"""`fleetctl edit`: opens objects or manifest files in the user's editor, again and again until the text is valid."""

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

from fleetctl.cli import arguments
from fleetctl.cli.arguments import reason_option
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError, InterruptedByUser
from fleetctl.objects import git_warnings, targets
from fleetctl.objects.results import ResultPrinter
from fleetctl.verbs import edit_session
from fleetctl.verbs.edit_session import EditSession, RejectedError, load_text
from machinery.clock import Clock, SystemClock
from machinery.environment import environment_without_secrets
from manifests import apply as applying
from manifests import sources
from manifests.errors import ApplyError, ManifestError, ManifestErrors
from manifests.load import LoadedObject
from schemas.meta import ApiObject
from store.codec import UndecodableError
from store.errors import StoreError
from store.port import Transport


class Editor:
    """An editor command; the file to edit is its last argument."""

    def __init__(self, command: str, suffix: str) -> None:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise FleetctlError(
                f"the editor {command!r} is not a valid command: {error}"
            ) from error
        if not words:
            raise FleetctlError("the editor command is empty; set one, such as EDITOR=nano")
        self._words = words
        self._suffix = suffix

    def edited(self, text: str) -> str:
        """Open the text and return the saved one. Waits until the editor ends, without a limit.

        Raises:
            FleetctlError: the editor cannot be started, or failed; or the saved file is not text.

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
                    f"the file that {self._words[0]} saved is not UTF-8; nothing was changed"
                ) from error

    def _run(self, path: Path) -> None:
        name = self._words[0]
        try:
            with _ignore_interrupts():
                code = subprocess.run(
                    [*self._words, str(path)], check=False, env=environment_without_secrets()
                ).returncode
        except OSError as error:
            raise FleetctlError(
                f"the editor {name!r} cannot be started: {error.strerror}. Choose another one with "
                "FLEETCTL_EDITOR or EDITOR, such as EDITOR=nano"
            ) from error
        if code:
            raise FleetctlError(f"the editor {name!r} ended with code {code}; nothing was changed")


def save_copy(text: str, suffix: str) -> Path:
    """Save the user's text to a temporary file, so that a failure does not lose it; return its path."""
    number, name = tempfile.mkstemp(prefix="fleetctl-edit-", suffix=suffix)
    with os.fdopen(number, "wb") as file:
        file.write(text.encode())
    return Path(name)


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Leave Ctrl-C to the editor.

    The handler does nothing. SIG_IGN would be inherited by the editor; a handler is not.
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
    """A manifest file, and its text when it was opened. Comments and formatting are kept."""

    path: Path
    text: str

    @classmethod
    def of(cls, name: str) -> "EditedFile":
        """Read a file.

        Raises:
            FleetctlError: it is not a file, or cannot be read or written.

        """
        path = Path(name)
        if name == sources.STDIN or path.is_dir():
            raise FleetctlError(f"{name}: only files can be edited; give each with its own -f")
        [(_, found)] = sources.read_all([name], recursive=False, stdin=None)
        if isinstance(found, ManifestError):
            raise FleetctlError(str(found))
        if not os.access(path, os.W_OK):
            raise FleetctlError(f"{name}: you have no permission to write it; see: ls -l {name}")
        return cls(path=path, text=found)

    @property
    def suffix(self) -> str:
        """The suffix by which editors recognise the language."""
        return self.path.suffix if self.path.suffix in (".yaml", ".yml", ".json") else ".yaml"

    async def save(self, transport: Transport, clock: Clock, text: str) -> None:
        """Check the text, save it to the file, apply it, and print the results.

        The file is saved first: in the other order, a crash in between would leave a file that reverts the change.

        Raises:
            RejectedError: the text is invalid; nothing was saved.
            FleetctlError: the text could not be saved, or was saved but could not be applied.

        """
        loaded = load_text(text, self.suffix)
        try:
            await applying.prepare(transport, loaded, clock)
        except ManifestErrors as errors:
            head = "nothing was saved because of these problems:"
            raise RejectedError(head, errors.problems) from None
        self._replace(text)
        try:
            applied = await applying.apply(transport, loaded, clock)
        except (ManifestErrors, ApplyError, UndecodableError, StoreError) as error:
            raise FleetctlError(
                f"{self.path} was saved but not applied: {error}. Apply it: fleetctl apply -f {self.path}"
            ) from error
        click.echo(f"{self.path} saved")
        for outcome in applied.outcomes:
            click.echo(f"{outcome.obj.kind.lower()}/{outcome.obj.name} {outcome.result}")
        for conflict in applied.kept_by_others:
            click.echo(f"warning: {conflict.kept_message}", err=True)
        await git_warnings.warn_of_objects(
            transport, (applied_object.obj for applied_object in applied.outcomes)
        )

    def _replace(self, text: str) -> None:
        """Replace the file atomically."""
        target = self.path.resolve()
        try:
            if target.read_bytes().decode(errors="replace") != self.text:
                raise FleetctlError(
                    f"{self.path} was changed by another program while it was edited; it was not saved"
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


_HELP = """Edit objects in your editor. The saved text is checked and written.

\b
  fleetctl edit md qwen
  fleetctl edit md/qwen np/studio
  EDITOR="code --wait" fleetctl edit md qwen -o json
  fleetctl edit -f qwen.yaml

The editor is FLEETCTL_EDITOR, else EDITOR, else vi. If the text is invalid, or another writer changed the same fields
meanwhile, the editor opens again with the problems at the top. Save without changes to cancel. Only the fields that you
changed are written.

With -f, edit a manifest file: once it is valid, it is saved and applied. Comments are kept.
"""

_Save = Callable[[str], None]


@click.command(help=_HELP)
@click.argument("words", nargs=-1, metavar="[KIND NAME... | KIND/NAME...]")
@click.option(
    "-f", "--filename", "files", multiple=True, help="Manifest file to edit, save and apply."
)
@click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(["yaml", "json"]),
    help="Format of objects in the editor (default: yaml).",
)
@click.option(
    "--editor",
    envvar=["FLEETCTL_EDITOR", "EDITOR"],
    default="vi",
    show_default=True,
    help="Editor command with its flags.  [env: FLEETCTL_EDITOR, EDITOR]",
)
@arguments.selector_option
@reason_option
@store_options
def edit(words: tuple[str, ...], files: tuple[str, ...], **options: Any) -> None:
    """Edit objects in your editor. The saved text is checked and written."""
    if files:
        if words or options["selector"]:
            raise click.UsageError("give names, or files with -f, but not both")
        if options["form"]:
            raise click.UsageError("-o applies to objects; remove it with -f")
        for opened_file in [EditedFile.of(name) for name in files]:
            _edit_file(opened_file, options)
        return
    chosen = targets.parse_selections(words, {**options, "files": ()}, verb="edit", is_all=None)

    async def read() -> list[ApiObject]:
        async with open_store(options) as transport:
            return await targets.read_all_selected(transport, chosen)

    objects = run(read())
    if objects:
        _edit_objects(EditSession.of(objects), options)


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
            session = session.with_acknowledged(error.merges)
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
    """The saved text does not change the objects."""


def _edit_until_saved(editor: Editor, body: str, suffix: str, save: _Save) -> None:
    """Open the editor until the saved text could be written, or the user cancels.

    Raises:
        FleetctlError: the user cancelled an invalid text, or the store refused it; a copy is kept.

    """
    notes: list[str] = list(edit_session.INSTRUCTIONS)
    was_refused = False
    while True:
        shown = edit_session.with_notes(notes, body)
        left = editor.edited(shown)
        if left == shown and was_refused:
            reasons = "\n".join(notes[len(edit_session.INSTRUCTIONS) :])
            # The lines of the problems are those of the copy, which has them at its top.
            raise FleetctlError(f"Edit cancelled, {reasons}{_copy_note(shown, suffix)}")
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
    """Save a copy of the user's text; return the end of an error message, with its path."""
    return f". A copy of your changes is in {save_copy(body, suffix)}"
