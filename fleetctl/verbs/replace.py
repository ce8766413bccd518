"""`fleetctl replace`: objects become exactly what a manifest says, whoever wrote what; --force makes them anew."""

import sys
from collections.abc import Sequence
from typing import Any

import click

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.objects import targets, writer
from fleetctl.objects.writer import create_all
from fleetctl.output.results import ResultPrinter, result_options
from fleetctl.verbs.wait import parse_duration
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

_HELP = """Make objects exactly what the manifests say: what others set, and a manifest does not say, goes.

\b
  fleetctl replace -f qwen.yaml
  fleetctl get md qwen -o yaml | sed 's/replicas: 1/replicas: 2/' | fleetctl replace -f -
  fleetctl replace --force -f qwen.yaml --timeout=10m

A manifest with a metadata.resourceVersion, as `get -o yaml` writes it, holds for that version alone: if somebody
changed the object since, nothing is written. --force deletes the objects and creates them anew, which ends their
replicas first; what answers requests is away meanwhile.
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
@targets.recursive_option
@click.option("--force", is_flag=True, help="Delete the objects, and create them anew.")
@click.option(
    "--timeout",
    default="5m",
    show_default=True,
    help="With --force, how long to wait until they are gone; 0: for ever.",
)
@targets.manager_option
@result_options
@store_options
def replace(files: tuple[str, ...], force: bool, **options: Any) -> None:
    """Make objects exactly what the manifests say."""
    context = click.get_current_context()
    timeout_s = parse_duration(options["timeout"])
    is_given = context.get_parameter_source("timeout") is click.core.ParameterSource.COMMANDLINE
    if is_given and not force:
        raise click.UsageError("--timeout is about --force: nothing else waits")
    try:
        recursive = options["recursive"]
        loaded = load_objects(files, recursive=recursive, stdin=sys.stdin.buffer)
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was replaced:\n{error}") from error
    run(_recreate_all(loaded, options, timeout_s) if force else _replace(loaded, options))


def replacement(now: ApiObject, item: LoadedObject, manager: str, clock: Clock) -> ApiObject | None:
    """Return the object as the manifest alone says; None if it is that, and this manager's. Pure but for the time.

    Raises:
        FleetctlError: the manifest was made for another version, or the object is being deleted.

    """
    wrong = _other_version(now, item)
    if wrong is not None:
        raise FleetctlError(str(wrong))
    kept = diff.merge_annotations(now.metadata.annotations, item.obj.metadata.annotations)
    metadata = item.obj.metadata.model_copy(update={"annotations": kept})
    wanted = writer.merge_onto(now, item.obj.model_copy(update={"metadata": metadata}))
    # Whoever said what before, the manifest says it all now; other manifests' own last words stay what they were.
    when = clock.now()
    own = ownership.merge_manifest(
        None, item, manager=manager, force=False, now=when, uid=""
    ).obj.metadata.managed_fields
    before = [e for e in now.metadata.managed_fields if e.operation == "Apply"]
    others = tuple(entry for entry in before if entry.manager != manager)
    said = [(entry.manager, entry.applied) for entry in (*others, *own)]
    if wanted is None and said == [(e.manager, e.applied) for e in now.metadata.managed_fields]:
        return None
    made = wanted or now
    managed = made.metadata.model_copy(update={"managed_fields": (*others, *own)})
    return made.model_copy(update={"metadata": managed})


def _other_version(now: ApiObject, item: LoadedObject) -> ManifestError | None:
    """Return the complaint about a manifest that was read from another version, or another object."""
    for field, there in (
        ("uid", now.metadata.uid),
        ("resourceVersion", now.metadata.resource_version),
    ):
        said = item.document.text_at("metadata", field)
        if said and said != there:
            why = "is another object of the name" if field == "uid" else "was changed since"
            return item.document.problem(
                ("metadata", field),
                f"is {said}, and in the store {there}: what is there {why}",
                f"Get it again, or remove metadata.{field} to replace it whatever it is",
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
                results.declare(item.obj, "replaced")
                continue

            def edit(now: ApiObject, item: LoadedObject = item) -> ApiObject | None:
                return replacement(now, item, manager, clock)

            there = seen.objects[item.key]
            written = await targets.write_edit(
                transport, clock, there, edit, manager=None, is_dry=results.is_dry
            )
            results.say(written.obj, "replaced")


def _find_problems(loaded: Sequence[LoadedObject], seen: ObservedObjects) -> list[ManifestError]:
    problems: list[ManifestError] = []
    for item in loaded:
        there = seen.objects.get(item.key)
        if there is None:
            hint = "Use `fleetctl create` or `fleetctl apply` to make it"
            problems.append(item.document.problem(("metadata", "name"), "is not there", hint))
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
                results.declare(item.obj, "replaced")
            return
        there = [seen.objects[item.key] for item in loaded if item.key in seen.objects]
        # Who names others goes before them, and comes after them.
        there.sort(key=lambda obj: -plan.ORDER.index(obj.kind))
        for obj in there:
            await _remove(transport, obj, clock)
        deadline = clock.monotonic() + timeout_s if timeout_s else float("inf")
        for obj in there:
            await _wait_gone(transport, obj, clock, deadline)
        try:
            await _recreate(transport, loaded, clock, results, options["manager"])
        except ManifestErrors as error:
            raise FleetctlError(f"they are deleted, and were not created anew:\n{error}") from error


async def _remove(transport: Transport, obj: ApiObject, clock: Clock) -> None:
    """Delete an object, or begin to; what is gone already is fine."""
    try:
        await deleting.delete(transport, obj.kind, obj.name, clock)
    except NotFoundError:
        return
    except (InUseError, WriteRefusedError) as error:
        raise FleetctlError(
            f"{targets.object_ref(obj)} cannot be deleted first: {error}"
        ) from error


async def _wait_gone(transport: Transport, old: ApiObject, clock: Clock, deadline: float) -> None:
    """Wait until the very object is not there any more."""
    while True:
        there = await objects.get(transport, type(old), old.name)
        if there is None or there.metadata.uid != old.metadata.uid:
            return
        if clock.monotonic() >= deadline:
            label = targets.object_ref(old)
            raise FleetctlError(
                f"{label} is marked for deletion, but not gone in time, and nothing was created anew. It goes when its "
                f"engines have ended; does a reconciler lead? When it is gone (fleetctl wait {label} --for=delete), "
                "create it: fleetctl create -f FILE"
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
        transport, loaded, clock, manager=manager, tell=lambda obj: results.say(obj, "replaced")
    )
