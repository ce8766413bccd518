"""`fleetctl sync`, `suspend` and `resume`: synchronise GitSources now, or pause them."""

import secrets
from dataclasses import dataclass
from typing import Any

import click

from fleetctl.cli.arguments import parse_duration, reason_option, timeout_option
from fleetctl.cli.connect import with_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.terminal import ProgressLine
from fleetctl.objects import git_preview, reader, targets
from fleetctl.objects.change import change_options, select_of_kind, take_action
from fleetctl.objects.kind_args import kind_of, parse_names
from fleetctl.objects.waits import poll
from machinery.clock import Clock, SystemClock
from schemas.gitsource import GitSource, with_sync_request
from schemas.meta import Condition, ConditionStatus, find_condition
from store import objects
from store.mutate import mutate
from store.port import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOutcome:
    """The state of a source after the synchronisation."""

    text: str
    """The line to print."""
    is_ready: bool


@click.command()
@click.argument("sources", nargs=-1, metavar="[SOURCE...]")
@timeout_option("5m", "Time limit, such as 90s or 5m.")
@click.option("--wait/--no-wait", "waits", default=True, help="Wait for the outcome.")
@click.option(
    "--dry-run",
    "is_dry",
    is_flag=True,
    help="Show what the newest commits would change, and change nothing.",
)
@reason_option
@with_store
async def sync(
    transport: Transport, sources: tuple[str, ...], *, waits: bool, is_dry: bool, **options: Any
) -> None:
    """Fetch new commits now, and wait until they are applied.

    Without SOURCE, all GitSources are synchronised. Exit code 1 if a source is not applied and ready. With --dry-run,
    nothing is applied; `fleetctl diff gs/NAME` shows the differences line by line.
    """
    limit_s = parse_duration(options["timeout"])
    if is_dry:
        names = _parse_names(sources)
        chosen = targets.selection(kind_of("gitsources"), names, is_all=not names)
        previews = await git_preview.request_all(transport, chosen, limit_s)
        for named_preview in previews:
            head, preview = f"gitsource/{named_preview.source}", named_preview.preview
            if preview.problem:
                click.echo(
                    f"{head} {preview.revision or 'was not fetched'}: {preview.problem}", err=True
                )
                continue
            count = len(preview.changes) + preview.omitted
            what = f"{count} change{'' if count == 1 else 's'}" if count else "nothing would change"
            click.echo(f"{head} {preview.revision}: {what}")
            for change in preview.changes:
                click.echo(f"{change.kind.lower()}/{change.name} {change.action} (dry run)")
            if preview.omitted:
                click.echo(f"... and {preview.omitted} more", err=True)
        if any(named_preview.preview.problem for named_preview in previews):
            raise click.exceptions.Exit(1)
        return
    outcomes = await _sync(transport, _parse_names(sources), limit_s if waits else None)
    for outcome in outcomes:
        click.echo(outcome.text, err=not outcome.is_ready)
    if not all(outcome.is_ready for outcome in outcomes):
        raise click.exceptions.Exit(1)


@click.command()
@change_options("SOURCE...", is_of_one_kind=True)
async def suspend(transport: Transport, words: tuple[str, ...], **options: Any) -> None:
    """Stop applying new commits of GitSources until `fleetctl resume`."""
    await take_action(transport, "suspend", select_of_kind(words, "gitsources", options), options)


@click.command()
@change_options("SOURCE...", is_of_one_kind=True)
async def resume(transport: Transport, words: tuple[str, ...], **options: Any) -> None:
    """Resume applying new commits of suspended GitSources."""
    await take_action(transport, "unsuspend", select_of_kind(words, "gitsources", options), options)


def _parse_names(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in `fleet`, `gs/fleet` or `gs fleet`. Raises as `kind_args.parse_names`."""
    return tuple(dict.fromkeys(parse_names(words, kind_of("gitsources")))) if words else ()


async def _sync(
    transport: Transport, names: tuple[str, ...], limit_s: float | None
) -> list[SyncOutcome]:
    clock = SystemClock()
    api_objects = await reader.read(transport, kind_of("gitsources"), names)
    sources = [api_object for api_object in api_objects if isinstance(api_object, GitSource)]
    if not sources:
        raise FleetctlError(
            "no GitSource found. Apply a manifest of this kind; examples/gitops/ has one"
        )
    suspended = [source.name for source in sources if source.spec.suspend]
    if suspended and names:
        raise FleetctlError(
            f"gitsource/{suspended[0]} is suspended; run: fleetctl resume gs/{suspended[0]}"
        )
    requested = [source for source in sources if not source.spec.suspend]
    request_id = secrets.token_hex(4)
    for one in requested:
        await mutate(
            transport,
            clock,
            GitSource,
            one.name,
            lambda now: with_sync_request(now, request_id),
        )
    outcomes = [
        SyncOutcome(text=f"gitsource/{one} is suspended", is_ready=bool(requested))
        for one in suspended
    ]
    if limit_s is None:
        return [
            *outcomes,
            *(SyncOutcome(text=f"gitsource/{o.name} requested", is_ready=True) for o in requested),
        ]
    deadline = clock.monotonic() + limit_s
    with ProgressLine() as progress:
        for one in requested:
            progress_line = _SyncProgress(one.name, request_id, progress)
            outcomes.append(await _wait_outcome(transport, clock, progress_line, deadline))
    return outcomes


class _SyncProgress:
    """Shows why a source is not ready yet: on a terminal in a progress line, else once for each problem."""

    def __init__(self, name: str, request_id: str, progress: ProgressLine) -> None:
        self.name = name
        self.request_id = request_id
        self._progress = progress
        self._shown: set[str] = set()

    def update(self, source: GitSource | None) -> None:
        """Show the state of the source; None means that the store does not answer."""
        self._progress.show(f"gitsource/{self.name}: {progress_text(source, self.request_id)}")
        condition = None if source is None else sync_trouble(source, self.request_id)
        # Compare reasons only: a message may contain a count of attempts.
        if (
            condition is not None
            and not self._progress.is_shown
            and condition.reason not in self._shown
        ):
            self._shown.add(condition.reason)
            self._progress.say(f"gitsource/{self.name}: {condition.reason}: {condition.message}")


def sync_trouble(source: GitSource, request_id: str) -> Condition | None:
    """Return why a source is not Ready yet, if its status answers this request. Pure."""
    ready = _condition(source, "Ready")
    if ready is None or ready.status is not ConditionStatus.FALSE:
        return None
    # A source that waits for others is not fetched, so its status does not carry the request.
    is_answered = source.status is not None and source.status.last_sync == request_id
    return ready if is_answered or ready.reason == "DependencyNotReady" else None


def progress_text(source: GitSource | None, request_id: str) -> str:
    """Return the progress of a source as text. Pure."""
    if source is None:
        return "the store does not answer"
    ready = _condition(source, "Ready")
    is_answered = source.status is not None and source.status.last_sync == request_id
    if ready is None or (not is_answered and ready.status is ConditionStatus.TRUE):
        return "waiting for the reconciler"
    return f"{ready.reason}: {ready.message}"


async def _wait_outcome(
    transport: Transport, clock: Clock, progress_line: _SyncProgress, deadline: float
) -> SyncOutcome:
    """Wait until the source was fetched and its state is final."""
    name, request_id = progress_line.name, progress_line.request_id
    source: GitSource | None = None

    async def look() -> SyncOutcome | None:
        nonlocal source
        source = await objects.get(transport, GitSource, name)
        if source is None:
            raise FleetctlError(f"gitsource/{name} is gone: it was deleted meanwhile")
        outcome = outcome_of(source, request_id)
        if outcome is None:
            progress_line.update(source)
        return outcome

    limit_s = deadline - clock.monotonic()
    outcome = await poll(look, clock, limit_s, on_outage=lambda: progress_line.update(None))
    late = SyncOutcome(text=_timeout_text(name, source, request_id), is_ready=False)
    return outcome or late


def outcome_of(source: GitSource, request_id: str) -> SyncOutcome | None:
    """Return the outcome of the request; None while it is in progress. Pure."""
    status, head = source.status, f"gitsource/{source.name}"
    ready, stalled = _condition(source, "Ready"), _condition(source, "Stalled")
    if status is None or ready is None:
        return None
    if stalled is not None and stalled.status is ConditionStatus.TRUE:
        # A source that waits for others is not fetched, so its status does not carry the request.
        is_answer = status.last_sync == request_id or ready.reason == "DependencyCircle"
        text = f"{head} is stalled ({ready.reason}): {ready.message}"
        return SyncOutcome(text=text, is_ready=False) if is_answer else None
    if status.last_sync != request_id or ready.status is ConditionStatus.FALSE:
        return None
    if ready.status is ConditionStatus.UNKNOWN:
        return SyncOutcome(text=f"{head} ({ready.reason}): {ready.message}", is_ready=False)
    return SyncOutcome(text=f"{head} {ready.message}", is_ready=True)


def _condition(source: GitSource, type_: str) -> Condition | None:
    """Return a condition of the current generation."""
    condition = (
        find_condition(source.status.conditions, type_) if source.status is not None else None
    )
    is_current = (
        condition is not None and condition.observed_generation >= source.metadata.generation
    )
    return condition if is_current else None


def _timeout_text(name: str, source: GitSource | None, request_id: str) -> str:
    ready = None if source is None else _condition(source, "Ready")
    is_answered = (
        source is not None and source.status is not None and source.status.last_sync == request_id
    )
    if ready is not None and (is_answered or ready.status is not ConditionStatus.TRUE):
        return f"gitsource/{name} is not Ready in time ({ready.reason}): {ready.message}"
    return (
        f"gitsource/{name} was not fetched in time: check that a reconciler runs, for example with "
        "`fleetctl doctor`"
    )
