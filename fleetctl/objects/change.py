"""The pipeline of verbs that change objects: select, edit, preview, write by compare-and-swap, report.

A verb is its options and one `ObjectEdit`: a pure function with the words for its result.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import click

from fleetctl.cli import arguments
from fleetctl.cli.connect import with_store
from fleetctl.objects import targets, writer
from fleetctl.objects.kind_args import kind_of, parse_names
from fleetctl.objects.results import ResultPrinter
from fleetctl.objects.targets import Selection
from insight import actions
from insight.actions import Action, Verb
from insight.edits import ObjectEdit
from machinery.clock import SystemClock
from schemas import kinds
from schemas.meta import ApiObject
from store.port import Transport

EditOf: TypeAlias = Callable[[Transport, Any], Awaitable[ObjectEdit[Any]]]
"""Returns the edit of one object, from what the store has about it."""


def change_options(metavar: str, *, is_of_one_kind: bool = False) -> Callable[..., Any]:
    """Return the decorator with the arguments and flags of a verb that changes objects, and the open store.

    A verb for one kind takes names without the kind, and no files.
    """
    of_any_kind = (arguments.files_option, arguments.recursive_option)
    decorators = (
        click.argument("words", nargs=-1, metavar=metavar),
        arguments.selector_option,
        arguments.all_option,
        *(() if is_of_one_kind else of_any_kind),
        arguments.result_options,
        with_store,
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def select_of_kind(
    words: Sequence[str], kind: str, options: Mapping[str, Any], *, otherwise: str = ""
) -> list[Selection]:
    """Return the selection of `NAME...`, `KIND NAME...`, `KIND/NAME...`, -l or --all, for verbs that know one kind.

    `otherwise` is the end of the error for another kind, after its plural.

    Raises:
        click.UsageError: the words and flags select nothing, contradict each other, or name another kind.

    """
    of, labels, is_all = kind_of(kind), options["selector"], options["is_all"]
    # kubectl's own form names the kind: `taint nodes --all KEY-`.
    if len(words) == 1 and (labels or is_all) and kinds.by_alias(words[0]) is of:
        words = ()
    names = parse_names(words, of, otherwise=otherwise) if words else []
    return [targets.selection(of, names, labels=labels, is_all=is_all)]


async def take_action(
    transport: Transport, verb: Verb, chosen: Sequence[Selection], options: dict[str, Any]
) -> None:
    """Take an action on the selected objects, and print a line for each. Raises as `change_objects`."""

    async def edit_of(transport: Transport, obj: Any) -> ObjectEdit[Any]:
        action = Action(verb=verb, name=obj.name, revision=options.get("revision"))
        return await actions.edit_of(transport, SystemClock(), obj, action)

    await change_objects(transport, chosen, edit_of, options)


async def change_objects(
    transport: Transport,
    chosen: Sequence[Selection],
    change: ObjectEdit[Any] | EditOf,
    options: dict[str, Any],
    *,
    check: Callable[[Sequence[Any]], Awaitable[None]] | None = None,
) -> list[ApiObject]:
    """Change the selected objects, print a line for each, and return them as they are then.

    All edits are tried before the first write, so that none is written if one is refused. `check` may refuse the objects
    as they were read, except with --dry-run=client.

    Raises:
        FleetctlError: an object is missing.
        EditRefusedError: an edit was refused.
        StoreError: the store did not answer.

    """
    clock, results = SystemClock(), ResultPrinter.of(options)
    objects = await targets.read_all_selected(transport, chosen)
    edits = [
        change if isinstance(change, ObjectEdit) else await change(transport, obj)
        for obj in objects
    ]
    for obj, edit in zip(objects, edits, strict=True):
        edit.applied(obj, clock.now())
    if check is not None and results.dry_run != "client":
        await check(objects)
    changed: list[ApiObject] = []
    for obj, edit in zip(objects, edits, strict=True):
        written = await writer.write_edit(transport, clock, obj, edit, is_dry=results.is_dry)
        done = edit.done if written.is_changed else edit.unchanged
        results.print_object(written.obj, done)
        changed.append(written.obj)
    return changed
