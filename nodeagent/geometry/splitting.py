"""Over how many Macs the installed mlx-lm can split a model: asks a child process, and remembers what it said.

The child (nodeagent/engine/splitting.py) builds the model without reading its weights, which takes seconds, most of
them imports. Nobody waits for it: whoever asks again later gets the answer. One runs at a time. Must not import mlx.
"""

import hashlib
import importlib.metadata
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ValidationError

from machinery import processes
from machinery.backoff import Backoff
from machinery.clock import Clock
from machinery.files import write_atomically
from nodeagent.modeldir import ModelFacts

# Goes up when the child says more, or something else: what an older one said is then asked for anew.
_FORM: Final = 1
# The child ends by itself after 300 s; but a frozen one does not.
_LIMIT_S: Final = 330.0
# Looking again costs seconds of a core; but a person may have mended what was wrong, or the Mac be less busy.
_AGAIN: Final = Backoff(first_s=30.0, limit_s=600.0)
_MODULE: Final = "nodeagent.engine.splitting"


class Weight(BaseModel):
    """What some arrays take."""

    total_bytes: int
    half_bytes: int
    """How many of them are float16 or bfloat16."""

    def in_memory(self, *, casts_to_float32: bool) -> int:
        """Return the bytes that they take in an engine."""
        return self.total_bytes + (self.half_bytes if casts_to_float32 else 0)


class Found(BaseModel):
    """What the child said of one model."""

    tensor: dict[int, Weight]
    """For each number of ranks over which every layer can be split, one rank's weights."""
    refused: dict[int, str]
    """Why other numbers of ranks cannot, in mlx-lm's words; none where the architecture cannot at all."""
    layers: tuple[Weight, ...]
    """Each layer's weights, the first one first; none where whole layers cannot be dealt out."""
    rest: Weight
    """What every rank has besides its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Nothing could be found out."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A child that runs."""

    key: str
    child: processes.Child
    said: Path
    """The file that it writes to."""
    until: float
    """By the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    why: str
    times: int
    again_at: float


class Splitter:
    """Knows how models can be split. Several threads may ask."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        """`folder` keeps answers from one agent to the next."""
        self._folder = folder
        self._clock = clock
        self._known: dict[str, Found] = {}
        self._failures: dict[str, _Failure] = {}
        self._look: _Look | None = None
        self._lock = threading.Lock()

    def ask(self, model: Path, facts: ModelFacts) -> Found | Failed | None:
        """Return how the model in the folder can be split; None while that is being found out."""
        with self._lock:
            self._collect()
            key = _key(model, facts)
            found = self._known.get(key) or self._kept(key)
            if found is not None:
                return found
            failure = self._failures.get(key)
            is_due = failure is None or self._clock.monotonic() >= failure.again_at
            if is_due and self._look is None:
                self._begin(key, model)
                failure = self._failures.get(key)
            return None if failure is None else Failed(why=failure.why)

    def is_looking(self) -> bool:
        """Return whether an answer is under way, or has just come: so that it is worth asking again soon."""
        with self._lock:
            was_looking = self._look is not None
            self._collect()
            return was_looking

    def _kept(self, key: str) -> Found | None:
        try:
            found = Found.model_validate_json((self._folder / f"{key}.json").read_bytes())
        except (OSError, ValidationError):
            return None  # nobody looked yet, or the disk lost some of it: looking again mends both
        self._known[key] = found
        return found

    def _begin(self, key: str, model: Path) -> None:
        said = self._folder / "looking.log"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            said.unlink(missing_ok=True)
            argv = [sys.executable, "-m", _MODULE, str(model), str(os.getpid())]
            child = processes.spawn(argv, log=said, cwd=self._folder)
        except OSError as error:
            self._fail(key, f"no process could be started for it: {error}")
            return
        until = self._clock.monotonic() + _LIMIT_S
        self._look = _Look(key=key, child=child, said=said, until=until)

    def _collect(self) -> None:
        """Take what the child said if it is done; end it if it takes too long."""
        look = self._look
        if look is None:
            return
        if look.child.running():
            if self._clock.monotonic() > look.until:
                look.child.send(signal.SIGKILL)
                self._look = None
                self._fail(look.key, f"it was not done within {_LIMIT_S:.0f} s")
            return
        self._look = None
        said = processes.last_lines(look.said, 1)
        if look.child.exit_code() != 0:
            self._fail(look.key, said or f"the child ended with {look.child.exit_code()}")
            return
        try:
            found = Found.model_validate_json(look.said.read_text().splitlines()[-1])
            write_atomically(self._folder / f"{look.key}.json", found.model_dump_json())
        except (OSError, ValueError, LookupError) as error:
            self._fail(look.key, f"{said[:200]}: {error}")
            return
        self._known[look.key] = found

    def _fail(self, key: str, why: str) -> None:
        times = self._failures[key].times + 1 if key in self._failures else 1
        again_at = self._clock.monotonic() + _AGAIN.delay_s(times)
        words = " ".join(why.split())[:300]
        self._failures[key] = _Failure(why=words, times=times, again_at=again_at)


def _key(model: Path, facts: ModelFacts) -> str:
    """Return what tells one answer from another: versions, the model's config, and what its tensors add up to."""
    try:
        config = (model / "config.json").read_bytes()
    except OSError:
        config = b""  # it vanished this very moment: the child will say so
    said = (_FORM, _version("mlx-lm"), _version("mlx"), repr(facts.weights))
    return hashlib.sha256(repr(said).encode() + config).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
