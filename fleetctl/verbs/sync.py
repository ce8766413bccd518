"""`fleetctl sync`, `suspend` and `resume`: GitSources at work, and at rest."""

import secrets
from dataclasses import dataclass
from typing import Any

import click

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.terminal import ProgressLine
from fleetctl.objects import reader, targets
from fleetctl.objects.kind_args import kind_of
from fleetctl.verbs.wait import parse_duration
from machinery.clock import Clock, SystemClock
from schemas.gitsource import SYNC_REQUESTED, GitSource
from schemas.meta import Condition, ConditionStatus, find_condition
from store import objects
from store.errors import UnavailableError
from store.mutate import mutate
from store.port import Transport

_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOutcome:
    """How a source stands after it was looked at."""

    text: str
    """What to print."""
    is_well: bool


@click.command()
@click.argument("sources", nargs=-1, metavar="[SOURCE...]")
@click.option("--timeout", default="5m", show_default=True, help="How long, such as 90s or 5m.")
@click.option("--wait/--no-wait", "waits", default=True, help="Whether to wait for the outcome.")
@store_options
def sync(sources: tuple[str, ...], timeout: str, *, waits: bool, **options: Any) -> None:
    """Look for new commits now; wait until the newest is applied, or say why it is not.

    Without SOURCE, all GitSources. Exit code 1 if one of them is not applied and well.
    """
    limit_s = parse_duration(timeout)
    found = run(_sync(_parse_names(sources), limit_s if waits else None, options))
    for one in found:
        click.echo(one.text, err=not one.is_well)
    if not all(one.is_well for one in found):
        raise click.exceptions.Exit(1)


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@store_options
def suspend(sources: tuple[str, ...], **options: Any) -> None:
    """Leave what GitSources have applied as it is, whatever is committed, until `fleetctl resume`."""
    run(_set_suspended(_parse_names(sources), options, is_suspended=True))


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@store_options
def resume(sources: tuple[str, ...], **options: Any) -> None:
    """Have suspended GitSources follow their repositories again."""
    run(_set_suspended(_parse_names(sources), options, is_suspended=False))


def _parse_names(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in `fleet gs/other`."""
    found = []
    for word in words:
        before, slash, name = word.partition("/")
        if slash and kind_of(before).name != "GitSource":
            raise click.UsageError(f"{word} is no GitSource; write NAME or gs/NAME")
        found.append(name if slash else word)
    return tuple(dict.fromkeys(found))


async def _read_sources(transport: Transport, names: tuple[str, ...]) -> list[GitSource]:
    found = await reader.read(transport, kind_of("gitsources"), names)
    return [one for one in found if isinstance(one, GitSource)]


async def _sync(
    names: tuple[str, ...], limit_s: float | None, options: dict[str, Any]
) -> list[SyncOutcome]:
    clock = SystemClock()
    async with open_store(options) as transport:
        found = await _read_sources(transport, names)
        if not found:
            raise FleetctlError(
                "there is no GitSource. Apply a manifest of that kind, as in examples/gitops/"
            )
        resting = [one.name for one in found if one.spec.suspend]
        if resting and names:
            raise FleetctlError(
                f"gitsource/{resting[0]} is suspended; run: fleetctl resume gs/{resting[0]}"
            )
        asked = [one for one in found if not one.spec.suspend]
        word = secrets.token_hex(4)
        for one in asked:
            await mutate(
                transport, clock, GitSource, one.name, lambda now: _with_sync_request(now, word)
            )
        said = [SyncOutcome(text=f"gitsource/{one} is suspended", is_well=True) for one in resting]
        if limit_s is None:
            return [
                *said,
                *(SyncOutcome(text=f"gitsource/{o.name} asked", is_well=True) for o in asked),
            ]
        deadline = clock.monotonic() + limit_s
        with ProgressLine() as progress:
            for one in asked:
                telling = _SyncProgress(one.name, word, progress)
                said.append(await _wait_outcome(transport, clock, telling, deadline))
        return said


def _with_sync_request(source: GitSource, word: str) -> GitSource:
    notes = {**source.metadata.annotations, SYNC_REQUESTED: word}
    metadata = source.metadata.model_copy(update={"annotations": notes})
    return source.model_copy(update={"metadata": metadata})


class _SyncProgress:
    """Says why a source is waited for: to a person in one line that changes, to a pipe each trouble once."""

    def __init__(self, name: str, word: str, progress: ProgressLine) -> None:
        self.name = name
        self.word = word
        self._progress = progress
        self._told: set[str] = set()

    def tell(self, source: GitSource | None) -> None:
        """Say how the source stands; None is a store that does not answer."""
        self._progress.show(f"gitsource/{self.name}: {progress_text(source, self.word)}")
        found = None if source is None else sync_trouble(source, self.word)
        # By its reason: the message may count attempts.
        if found is not None and not self._progress.is_shown and found.reason not in self._told:
            self._told.add(found.reason)
            self._progress.say(f"gitsource/{self.name}: {found.reason}: {found.message}")


def sync_trouble(source: GitSource, word: str) -> Condition | None:
    """Return why a source that was asked with the word is not Ready yet, if that is no older news. Pure."""
    ready = _condition(source, "Ready")
    if ready is None or ready.status is not ConditionStatus.FALSE:
        return None
    # What waits for other sources is not looked for, so nothing answers to the word.
    is_heard = source.status is not None and source.status.last_sync == word
    return ready if is_heard or ready.reason == "DependencyNotReady" else None


def progress_text(source: GitSource | None, word: str) -> str:
    """Return what a source that was asked with the word is at. Pure."""
    if source is None:
        return "the store does not answer"
    ready = _condition(source, "Ready")
    is_heard = source.status is not None and source.status.last_sync == word
    if ready is None or (not is_heard and ready.status is ConditionStatus.TRUE):
        return "waiting for the reconciler to look"
    return f"{ready.reason}: {ready.message}"


async def _wait_outcome(
    transport: Transport, clock: Clock, telling: _SyncProgress, deadline: float
) -> SyncOutcome:
    """Wait until the source was looked at and came to rest."""
    name, word = telling.name, telling.word
    while True:
        try:
            source = await objects.get(transport, GitSource, name)
        except UnavailableError:
            if clock.monotonic() >= deadline:
                raise
            source = None
        else:
            if source is None:
                raise FleetctlError(f"gitsource/{name} is gone: somebody deleted it")
            found = outcome_of(source, word)
            if found is not None:
                return found
        telling.tell(source)
        if clock.monotonic() >= deadline:
            return SyncOutcome(text=_timeout_text(name, source, word), is_well=False)
        await clock.sleep(_POLL_S)


def outcome_of(source: GitSource, word: str) -> SyncOutcome | None:
    """Return how a source stands; None while it is at work on what was asked. Pure."""
    status, head = source.status, f"gitsource/{source.name}"
    ready, stalled = _condition(source, "Ready"), _condition(source, "Stalled")
    if status is None or ready is None:
        return None
    if stalled is not None and stalled.status is ConditionStatus.TRUE:
        # What waits for other sources is not looked for, so nothing answers to the word.
        is_answer = status.last_sync == word or ready.reason == "DependencyCircle"
        text = f"{head} is stalled ({ready.reason}): {ready.message}"
        return SyncOutcome(text=text, is_well=False) if is_answer else None
    if status.last_sync != word or ready.status is ConditionStatus.FALSE:
        return None
    if ready.status is ConditionStatus.UNKNOWN:
        return SyncOutcome(text=f"{head} ({ready.reason}): {ready.message}", is_well=False)
    return SyncOutcome(text=f"{head} {ready.message}", is_well=True)


def _condition(source: GitSource, type_: str) -> Condition | None:
    """Return a condition, if it speaks of the spec as it is."""
    found = find_condition(source.status.conditions, type_) if source.status is not None else None
    is_current = found is not None and found.observed_generation >= source.metadata.generation
    return found if is_current else None


def _timeout_text(name: str, source: GitSource | None, word: str) -> str:
    ready = None if source is None else _condition(source, "Ready")
    is_heard = source is not None and source.status is not None and source.status.last_sync == word
    if ready is not None and (is_heard or ready.status is not ConditionStatus.TRUE):
        return f"gitsource/{name} is not Ready in time ({ready.reason}): {ready.message}"
    return f"gitsource/{name} was not looked at in time: does a reconciler lead? `fleetctl doctor` looks"


async def _set_suspended(
    names: tuple[str, ...], options: dict[str, Any], *, is_suspended: bool
) -> None:
    clock = SystemClock()
    done = "suspended" if is_suspended else "resumed"

    def edit(source: GitSource) -> GitSource | None:
        return targets.with_spec(source, suspend=is_suspended)

    async with open_store(options) as transport:
        for source in await _read_sources(transport, names):
            is_news = await targets.apply_edit(
                transport, clock, source, edit, manager="fleetctl-suspend"
            )
            click.echo(f"gitsource/{source.name} {done if is_news else f'already {done}'}")
