"""`fleetctl edit`: opens objects, or files, in the user's editor; what is wrong opens it again."""

from collections.abc import Callable
from typing import Any

import click

from fleetctl import targets
from fleetctl.connect import opened, run, store_options
from fleetctl.edit import objects, text
from fleetctl.edit.editor import Editor, kept
from fleetctl.edit.files import Opened
from fleetctl.edit.objects import RejectedError, Session
from fleetctl.errors import FleetctlError, InterruptedByUser
from fleetctl.results import Results
from machinery.clock import SystemClock
from manifests.load import Loaded
from schemas.meta import ApiObject

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
        for opened_file in [Opened.of(name) for name in files]:
            _edit_file(opened_file, options)
        return
    chosen = targets.choices(words, {**options, "files": ()}, verb="edit", is_all=None)

    async def read() -> list[ApiObject]:
        async with opened(options) as transport:
            return await targets.all_chosen(transport, chosen)

    found = run(read())
    if found:
        _edit_objects(Session.of(found), options)


def _edit_objects(session: Session, options: dict[str, Any]) -> None:
    form = options["form"] or "yaml"
    results = Results()

    def save(body: str) -> None:
        nonlocal session
        found = session.read(body, f".{form}")
        if not session.changed(found):
            raise _UnchangedError
        try:
            run(_write(session, found, results, options))
        except RejectedError as error:
            session = session.told(error.merges)
            raise

    _until_saved(Editor(options["editor"], f".{form}"), session.text(form), f".{form}", save)


async def _write(
    session: Session, found: list[Loaded], results: Results, options: dict[str, Any]
) -> None:
    async with opened(options) as transport:
        await objects.write(transport, SystemClock(), session, found, results)


def _edit_file(file: Opened, options: dict[str, Any]) -> None:
    def save(body: str) -> None:
        run(_apply(file, body, options))

    _until_saved(Editor(options["editor"], file.suffix), file.text, file.suffix, save)


async def _apply(file: Opened, body: str, options: dict[str, Any]) -> None:
    async with opened(options) as transport:
        await file.save(transport, SystemClock(), body)


class _UnchangedError(Exception):
    """What was saved says what the objects say already."""


def _until_saved(editor: Editor, body: str, suffix: str, save: _Save) -> None:
    """Open the editor until what was saved could be written, or the user gave up.

    Raises:
        FleetctlError: the user gave up what was not valid, or the store refused it; a copy of it is kept.

    """
    notes: list[str] = list(text.HOW)
    was_refused = False
    while True:
        shown = text.with_notes(notes, body)
        left = editor.edited(shown)
        if left == shown and was_refused:
            said = "Edit cancelled, no valid changes were saved"
            raise FleetctlError(f"{said}{_copy(body, suffix)}")
        before, body = body, text.without_notes(notes, left)
        if body == before and not was_refused:
            click.echo("Edit cancelled, no changes made.")
            return
        if text.is_empty(body):
            click.echo("Edit cancelled, saved file was empty.")
            return
        try:
            save(body)
        except _UnchangedError:
            click.echo("Edit cancelled, no changes made.")
        except RejectedError as error:
            notes, was_refused = text.complaints(error.head, error.problems), True
            continue
        except InterruptedByUser as error:
            raise InterruptedByUser(f"interrupted{_copy(body, suffix)}") from error
        except FleetctlError as error:
            raise FleetctlError(f"{error.message.rstrip('.')}{_copy(body, suffix)}") from error
        return


def _copy(body: str, suffix: str) -> str:
    """Keep what the user wrote; return where, for the end of a refusal."""
    return f". A copy of your changes is in {kept(body, suffix)}"
