"""The values that the planner decides on: one replica and its engine, as this node observes them. Frozen."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from models.hub.progress import FetchProgress
from nodeagent.engines.references import ReferenceState
from schemas.formation import GoldenAnswer
from schemas.replica import RankStatus, Replica


class ProbeState(StrEnum):
    """The progress of an engine's probe: one token, or a group's golden answer."""

    NOT_TRIED = "NotTried"
    RUNNING = "Running"
    PASSED = "Passed"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """The reason why an epoch cannot go on, as this node sees it."""

    reason: str
    """RankEnded, RankSilent, RankStuck, MemoryExceeded, CannotStart or GoldenFailed."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFault:
    """The reason why the agent ends an engine that runs and is wanted."""

    reason: str
    """EngineSilent, EngineStuck, LoadStuck or MemoryExceeded."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStart:
    """The next attempt to start an engine, after a failure."""

    in_s: float
    at: datetime


class FetchState(StrEnum):
    """The state of a hub model on this disk."""

    NOT_STARTED = "NotStarted"
    RUNNING = "Running"
    FAILED = "Failed"
    PRESENT = "Present"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedFetch:
    """The fetch of a replica's model from a hub."""

    state: FetchState
    size_bytes: int = 0
    """Bytes of a model that is present."""
    progress: FetchProgress | None = None
    """The progress of a fetch that runs, in steps."""
    reason: str = ""
    """The reason of the last failure: one of `models.hub.errors`, StoreUnreachable or DiskFailed."""
    message: str = ""
    """The error of the last failure; of a model that was fetched for this replica, its size and duration."""
    next_attempt: NextStart | None = None
    """The next attempt after a failure; None if it is due."""
    is_partial: bool = False
    """True if the disk has the files of this rank's layers only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRank:
    """The part of an observed engine that exists only for a rank of a group."""

    epoch: int
    memory_bytes: int = 0
    """The memory that the proof grants it."""
    state_s: float = 0.0
    """Seconds for which it has reported the same state."""
    unanswered_s: float = 0.0
    """Seconds since its last answer; 0 unless more than one question failed."""
    loaded: float = 0.0
    """The part of its weights that is loaded, from 0 to 1."""
    is_frozen: bool = False
    """True if it is stopped (SIGSTOP), so that it cannot react to a request to end."""
    killed_s: float | None = None
    """Seconds since it was killed without ending; None if it was not killed."""
    answer: GoldenAnswer | None = None
    """Its answer to the golden question."""
    probe_failures: int = 0
    """Consecutive failures to answer the golden question."""
    epoch_end: EpochEnd | None = None
    """The reason its epoch was given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedEngine:
    """One engine process, running or ended."""

    replica_uid: str
    is_running: bool
    state: str = ""
    """Its own report: Joining (a rank), Loading, Ready, Draining or Failed; "" before the first."""
    message: str = ""
    silent_s: float = 0.0
    """Seconds since its last answer; 0 if that was recent."""
    probe: ProbeState = ProbeState.NOT_TRIED
    probe_error: str = ""
    """The error of the last probe, also while the next one runs."""
    probe_again_in_s: float = 0.0
    """The rest of the backoff after a failed probe, in seconds."""
    stopping_s: float | None = None
    """Seconds since it was asked to end; None if it was not."""
    exit_code: int | None = None
    last_words: str = ""
    """The last line of its log, if that can explain its end."""
    start_again_in_s: float = 0.0
    """The rest of the backoff after it ended by itself, in seconds."""
    start_again_at: datetime | None = None
    """The time of the next start after a long backoff; None after a short one."""
    restarts: int = 0
    last_end: str = ""
    """The end of the engine before this one, such as `ended with 2: no config.json`; "" for the first one."""
    fault: EngineFault | None = None
    """The reason why the agent asked it to end; None if it did not, or if it is not wanted."""
    peak_bytes: int = 0
    """The peak memory of this process; 0 if unknown."""
    proof_bytes: int = 0
    """The memory that the proof grants it; 0 if unknown."""
    used_bytes: int = 0
    """Its memory at the last reading; 0 if unknown."""
    excess_s: float = 0.0
    """Seconds for which its memory has been far beyond its proof."""
    stalled_s: float = 0.0
    """Seconds for which it had been busy without progress at its last answer."""
    slowest_s: float = 0.0
    """Its slowest step so far, in seconds; 0 before the first."""
    prefixes: tuple[str, str] = ("", "")
    """Reason and message of PrefixesPinned; empty without prefixes."""
    rank: ObservedRank | None = None
    """None for an engine that has the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedReplica:
    """All facts that decide about one replica on this node."""

    replica: Replica | None
    """The replica that the reconciler assigned to this node; None if it assigned none."""
    is_unknown: bool = False
    """True if the store cannot say what is assigned: a backup is being restored, or the cache is behind."""
    engine: ObservedEngine | None = None
    fetch: ObservedFetch | None = None
    """The fetch of its model; None for a model in a folder, and while its engine runs."""
    is_published: bool = False
    """True if our endpoint for it is in the store."""
    is_stale: bool = False
    """True if that endpoint leads to an engine that is gone, because the store was unreachable."""
    is_outdated: bool = False
    """True if that endpoint must be published anew, because the fleet's TLS mode has changed."""
    start_error: str = ""
    """The reason this machine could not start the engine."""
    start_failures: int = 0
    """The number of consecutive failures to start it."""
    next_start: NextStart | None = None
    """The next attempt after a start error; None if it is due."""
    start_place: int = 0
    """The place in the queue of engines that wait to load; 0 if it may start now."""
    reported: RankStatus | None = None
    """Our last report in the store."""
    rank: int = 0
    """The rank of this node."""
    used_epoch: int = 0
    """The last epoch for which a rank was started here."""
    reference: ReferenceState = ReferenceState.NOT_TRIED
    """The progress of one process alone that answers the golden question."""
    found_reference: GoldenAnswer | None = None
    """The answer of that process."""
