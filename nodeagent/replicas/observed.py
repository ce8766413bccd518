"""What the agent's planner sees of one replica: frozen values."""

from dataclasses import dataclass
from enum import StrEnum

from schemas.formation import GoldenAnswer
from schemas.replica import RankStatus, Replica


class ProbeState(StrEnum):
    """How the one-token generation went."""

    NOT_TRIED = "NotTried"
    RUNNING = "Running"
    PASSED = "Passed"
    FAILED = "Failed"


class ReferenceState(StrEnum):
    """How the making of a reference for the golden answer went: by one process, before the ranks start."""

    NOT_TRIED = "NotTried"
    RUNNING = "Running"
    FOUND = "Found"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """Why an epoch cannot go on, as this node sees it."""

    reason: str
    """RankEnded, RankSilent, RankStuck, CannotStart or GoldenFailed."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRank:
    """What is seen of an engine that is one rank of a group."""

    epoch: int
    memory_bytes: int = 0
    """What the memory proof promised it."""
    state_s: float = 0.0
    """For how long it has said the same state, in seconds."""
    unheard_s: float = 0.0
    """For how long it has not answered, in seconds; 0 unless it failed to more than once."""
    stood_s: float = 0.0
    """For how long it had been busy without progress when it last answered, in seconds."""
    slowest_s: float = 0.0
    """The slowest step so far, in seconds."""
    loaded: float = 0.0
    """How much of its weights it has loaded, from 0 to 1."""
    is_frozen: bool = False
    """Whether it is stopped (SIGSTOP), and can hear nothing."""
    killed_s: float | None = None
    """Since when it has been killed and lives on; None if it was not killed."""
    answer: GoldenAnswer | None = None
    """What it answered to the golden question."""
    probe_failures: int = 0
    """How often in a row it gave no answer to that."""
    over: EpochEnd | None = None
    """Why it was given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedEngine:
    """One engine process, running or ended."""

    replica_uid: str
    is_running: bool
    state: str = ""
    """What it says of itself: Joining (a group's), Loading, Ready, Draining, Failed; empty while it says nothing."""
    message: str = ""
    silent_s: float = 0.0
    """Since when it has not answered, in seconds; 0 if it did."""
    probe: ProbeState = ProbeState.NOT_TRIED
    probe_error: str = ""
    """Why the last probe failed, also while the next one runs."""
    probe_again_in_s: float = 0.0
    """The rest of the backoff after a failed probe."""
    stopping_s: float | None = None
    """Since when it has been asked to end; None if it was not asked."""
    exit_code: int | None = None
    last_words: str = ""
    start_again_in_s: float = 0.0
    """The rest of the backoff after it ended by itself."""
    restarts: int = 0
    peak_bytes: int = 0
    """Most memory that this process took so far; 0 if it did not say."""
    rank: ObservedRank | None = None
    """None where the engine has the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedReplica:
    """Everything that decides about one replica on this node."""

    replica: Replica | None
    """What the reconciler wants here; None if nothing."""
    is_unknown: bool = False
    """Whether nobody can say what is wanted here: a backup is being restored, or we are behind."""
    engine: ObservedEngine | None = None
    is_published: bool = False
    """Whether our endpoint for it is in the store."""
    is_stale: bool = False
    """Whether that endpoint leads to an engine that is gone: it could not be withdrawn in time."""
    start_error: str = ""
    """Why this machine could not start the engine."""
    reported: RankStatus | None = None
    """What we last said about it."""
    rank: int = 0
    """Which of the replica's ranks is this node's."""
    used_epoch: int = 0
    """The last epoch of which a rank was started here."""
    reference: ReferenceState = ReferenceState.NOT_TRIED
    """Whether one process has answered the golden question; that process may run now."""
    found_reference: GoldenAnswer | None = None
    """What it answered."""
