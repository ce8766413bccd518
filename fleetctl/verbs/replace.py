"""`fleetctl replace`: makes objects equal to their manifests; with --force, deletes and creates them again."""

import sys
from collections.abc import Sequence
from typing import Any

import click

from fleetctl.cli import arguments
from fleetctl.cli.arguments import parse_duration, result_options
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import targets, writer
from fleetctl.objects.writer import create_all
from fleetctl.output.results import ResultPrinter
from machinery.clock import Clock, SystemClock
from manifests import delete as deleting
from manifests import diff, ownership, plan
from manifests.errors import (
    InUseError,
    ManifestError,
    ManifestErrors,
    NotFoundError,
    WriteRefusedError,
)
from manifests.load import LoadedObject, load_objects
from manifests.observe import ObservedObjects, observe
from manifests.validate import validate
from schemas.meta import ApiObject
from store import objects
from store.port import Transport

_POLL_S = 0.1

_HELP = """Replace objects with their manifests. Fields that are not in the manifests are removed.

\b
  fleetctl replace -f qwen.yaml
  fleetctl get md qwen -o yaml | sed 's/replicas: 1/replicas: 2/' | fleetctl replace -f -
  fleetctl replace --force -f qwen.yaml --timeout=10m

A manifest with metadata.resourceVersion, as `get -o yaml` prints it, applies only to that version: if the object was
changed since, nothing is written. --force deletes the objects and creates them again. It ends their replicas first, so
requests fail in between.
"""


@click.command(help=_HELP)
@click.option(
    "-f",
    "--filename",
    "files",
    multiple=True,
    required=True,
    help="File, folder or - for standard input; may be repeated.",
)
@arguments.recursive_option
@click.option("--force", is_flag=True, help="Delete the objects, and create them again.")
@click.option(
    "--timeout",
    default="5m",
    show_default=True,
    help="With --force: time limit for the deletion; 0 means no limit.",
)
@arguments.manager_option
@result_options
@store_options
def replace(files: tuple[str, ...], force: bool, **options: Any) -> None:
    """Replace objects with their manifests."""
    context = click.get_current_context()
    timeout_s = parse_duration(options["timeout"])
    is_given = context.get_parameter_source("timeout") is click.core.ParameterSource.COMMANDLINE
    if is_given and not force:
        raise click.UsageError("--timeout needs --force")
    try:
        recursive = options["recursive"]
        loaded = load_objects(files, recursive=recursive, stdin=sys.stdin.buffer)
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was replaced:\n{error}") from error
    run(_recreate_all(loaded, options, timeout_s) if force else _replace(loaded, options))


def replacement(now: ApiObject, item: LoadedObject, manager: str, clock: Clock) -> ApiObject | None:
    """Return the object as in the manifest; None if nothing changes, the owner included. Pure but for the time.

    Raises:
        FleetctlError: the manifest is of another version, or the object is being deleted.

    """
    wrong = _other_version(now, item)
    if wrong is not None:
        raise FleetctlError(str(wrong))
    kept = diff.merge_annotations(now.metadata.annotations, item.obj.metadata.annotations)
    metadata = item.obj.metadata.model_copy(update={"annotations": kept})
    changed = writer.merge_onto(now, item.obj.model_copy(update={"metadata": metadata}))
    # The manager owns all fields now. What other managers applied last stays recorded.
    when = clock.now()
    own = ownership.merge_manifest(
        None, item, manager=manager, force=False, now=when, uid=""
    ).obj.metadata.managed_fields
    before = [e for e in now.metadata.managed_fields if e.operation == "Apply"]
    others = tuple(entry for entry in before if entry.manager != manager)
    owners = [(entry.manager, entry.applied) for entry in (*others, *own)]
    if changed is None and owners == [(e.manager, e.applied) for e in now.metadata.managed_fields]:
        return None
    result = changed or now
    managed = result.metadata.model_copy(update={"managed_fields": (*others, *own)})
    return result.model_copy(update={"metadata": managed})


def _other_version(now: ApiObject, item: LoadedObject) -> ManifestError | None:
    """Return the problem of a manifest that was read from another version, or from another object."""
    for field, there in (
        ("uid", now.metadata.uid),
        ("resourceVersion", now.metadata.resource_version),
    ):
        given = item.document.text_at("metadata", field)
        if given and given != there:
            reason = "is another object of the same name" if field == "uid" else "was changed since"
            return item.document.problem(
                ("metadata", field),
                f"is {given}, but {there} in the store: the stored object {reason}",
                f"Get it again, or remove metadata.{field} to replace any version",
            )
    return None


async def _replace(loaded: Sequence[LoadedObject], options: dict[str, Any]) -> None:
    clock, results, manager = SystemClock(), ResultPrinter.of(options), options["manager"]
    async with open_store(options) as transport:
        seen = await observe(transport, [item.key for item in loaded])
        problems = [*_find_problems(loaded, seen), *validate(loaded, seen.known)]
        problems.extend(plan.find_refusals(loaded, seen.objects))
        if problems and results.dry_run != "client":
            raise FleetctlError(f"nothing was replaced:\n{ManifestErrors(problems)}")
        for item in sorted(loaded, key=lambda item: plan.ORDER.index(item.obj.kind)):
            if item.key not in seen.objects:
                results.print_declared(item.obj, "replaced")
                continue

            def edit(now: ApiObject, item: LoadedObject = item) -> ApiObject | None:
                return replacement(now, item, manager, clock)

            there = seen.objects[item.key]
            written = await writer.write_edit(
                transport, clock, there, edit, manager=None, is_dry=results.is_dry
            )
            results.print_object(written.obj, "replaced")


def _find_problems(loaded: Sequence[LoadedObject], seen: ObservedObjects) -> list[ManifestError]:
    problems: list[ManifestError] = []
    for item in loaded:
        there = seen.objects.get(item.key)
        if there is None:
            hint = "Create it with `fleetctl create` or `fleetctl apply`"
            problems.append(item.document.problem(("metadata", "name"), "does not exist", hint))
        elif (wrong := _other_version(there, item)) is not None:
            problems.append(wrong)
    return problems


async def _recreate_all(
    loaded: Sequence[LoadedObject], options: dict[str, Any], timeout_s: float
) -> None:
    clock, results = SystemClock(), ResultPrinter.of(options)
    async with open_store(options) as transport:
        seen = await observe(transport, [item.key for item in loaded])
        problems = [*validate(loaded, seen.known), *plan.find_refusals(loaded, {})]
        if problems:
            raise FleetctlError(f"nothing was replaced:\n{ManifestErrors(problems)}")
        if results.is_dry:
            for item in loaded:
                results.print_declared(item.obj, "replaced")
            return
        there = [seen.objects[item.key] for item in loaded if item.key in seen.objects]
        # Objects that refer to others are deleted before these, and created after them.
        there.sort(key=lambda obj: -plan.ORDER.index(obj.kind))
        for obj in there:
            await _remove(transport, obj, clock)
        deadline = clock.monotonic() + timeout_s if timeout_s else float("inf")
        for obj in there:
            await _wait_gone(transport, obj, clock, deadline)
        try:
            await _recreate(transport, loaded, clock, results, options["manager"])
        except ManifestErrors as error:
            raise FleetctlError(
                f"the objects were deleted but not created again:\n{error}"
            ) from error


async def _remove(transport: Transport, obj: ApiObject, clock: Clock) -> None:
    """Delete an object, or mark it for deletion; ignore an object that is gone."""
    try:
        await deleting.delete(transport, obj.kind, obj.name, clock)
    except NotFoundError:
        return
    except (InUseError, WriteRefusedError) as error:
        raise FleetctlError(
            f"{targets.object_ref(obj)} cannot be deleted first: {error}"
        ) from error


async def _wait_gone(transport: Transport, old: ApiObject, clock: Clock, deadline: float) -> None:
    """Wait until this object is gone."""
    while True:
        there = await objects.get(transport, type(old), old.name)
        if there is None or there.metadata.uid != old.metadata.uid:
            return
        if clock.monotonic() >= deadline:
            label = targets.object_ref(old)
            raise FleetctlError(
                f"{label} is marked for deletion but not gone in time; nothing was created. It is removed when its "
                f"engines have ended; check that a reconciler runs. When it is gone (fleetctl wait {label} --for=delete), "
                "create it again: fleetctl create -f FILE"
            )
        await clock.sleep(_POLL_S)


async def _recreate(
    transport: Transport,
    loaded: Sequence[LoadedObject],
    clock: Clock,
    results: ResultPrinter,
    manager: str,
) -> None:
    await create_all(
        transport,
        loaded,
        clock,
        manager=manager,
        report=lambda obj: results.print_object(obj, "replaced"),
    )
