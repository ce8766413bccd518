"""The preflight of Metal: a child process computes once on the GPU before the agent starts any engine.

Where Metal is missing or broken (no window server, a virtual machine, a driver that hangs), MLX aborts its process or
waits for ever. One child says so at once, instead of each engine after its load.
"""

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson
from pydantic import TypeAdapter

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from machinery.processes import describe_exit
from schemas.meta import Condition, ConditionStatus, find_condition, with_condition
from schemas.node import MetalDevice, MlxBuild, NodeStatus
from schemas.wire import engine_config

log = logging.getLogger(__name__)

METAL_AVAILABLE: Final = "MetalAvailable"
LIMIT_S: Final = 10.0
# A first import after a start of the Mac may take longer than the limit, and a driver may come up late.
_BACKOFF = Backoff(first_s=10.0, limit_s=300.0)
_MAX_OUTPUT = 64 * 1024
_MAX_WORDS = 200
_BUILD: Final = TypeAdapter[MlxBuild | None](MlxBuild | None)
_GPU: Final = TypeAdapter[MetalDevice | None](MetalDevice | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetalVerdict:
    """The result of one preflight."""

    is_available: bool
    reason: str
    message: str
    build: MlxBuild | None = None
    """The build of MLX; None if the check did not come so far."""
    device: MetalDevice | None = None
    """The GPU; None without Metal."""


async def check_device(
    argv: Sequence[str] = (sys.executable, "-m", engine_config.DEVICE_CHECK_MODULE),
    *,
    needs_metal: bool = True,
    limit_s: float = LIMIT_S,
) -> MetalVerdict:
    """Run the device check; without `needs_metal` MLX's CPU backend is enough."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
        )
    except OSError as error:
        return _failed("MetalCheckFailed", f"the check could not be started: {error.strerror}")
    try:
        async with asyncio.timeout(limit_s):
            assert process.stdout is not None
            kept = b""
            while piece := await process.stdout.read(_MAX_OUTPUT):
                kept = (kept + piece)[:_MAX_OUTPUT]
            printed = kept.decode(errors="replace")
            code = await process.wait()
    except TimeoutError:
        words = f"it did not multiply two small matrices within {limit_s:g} s"
        return _failed("MetalHangs", words)
    finally:
        # Also when the agent ends meanwhile: a check that hangs in the driver must not stay.
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
    return parse_check(printed, code, needs_metal=needs_metal)


def parse_check(printed: str, code: int, *, needs_metal: bool) -> MetalVerdict:
    """Return the verdict of a check that has ended, from its output and its exit code."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    if code != 0:
        words = f": {lines[-1][:_MAX_WORDS]}" if lines else ""
        return _failed("MetalAborted", f"the check {describe_exit(code)}{words}")
    try:
        found = orjson.loads(lines[-1] if lines else "")
        device, is_metal = str(found["device"])[:_MAX_WORDS], found["isMetal"] is True
        is_right = found["isRight"] is True
        build = _BUILD.validate_json(orjson.dumps(found.get("mlxBuild")))
        gpu = _GPU.validate_json(orjson.dumps(found.get("metalDevice")))
    except (ValueError, KeyError, TypeError):
        return _failed("MetalCheckFailed", "the check printed no result")
    if needs_metal and not is_metal:
        return _failed("MetalMissing", f"MLX found no Metal device, only {device}")
    if not is_right:
        return _failed("MetalWrong", f"{device} multiplied two matrices of ones wrongly")
    message = f"MLX computes on {device}"
    return MetalVerdict(
        is_available=True, reason="MetalWorks", message=message, build=build, device=gpu
    )


def _failed(reason: str, words: str) -> MetalVerdict:
    message = (
        f"{words}. No engine is started here. Restart this Mac; if that does not help, compare its macOS with what MLX "
        "supports, and see whether it is a virtual machine"
    )
    return MetalVerdict(is_available=False, reason=reason, message=message)


class MetalPreflight:
    """The preflight of one agent: repeated until it succeeds, with growing delays. Run `run()` in a task group."""

    def __init__(
        self,
        clock: Clock,
        argv: Sequence[str] = (sys.executable, "-m", engine_config.DEVICE_CHECK_MODULE),
        *,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._clock = clock
        self._argv = tuple(argv)
        self._limit_s = limit_s
        self._verdict: MetalVerdict | None = None
        self._has_verdict = asyncio.Event()

    @property
    def verdict(self) -> MetalVerdict | None:
        """The last result; None before the first one."""
        return self._verdict

    @property
    def refusal(self) -> str:
        """The reason why no engine may start; "" if one may."""
        if self._verdict is None:
            return "Metal is being checked"
        return "" if self._verdict.is_available else self._verdict.message

    async def wait(self) -> None:
        """Wait for the first verdict."""
        await self._has_verdict.wait()

    async def run(self, on_change: Callable[[], None]) -> None:
        """Check until a check succeeds; call `on_change` for each new verdict."""
        retries = Retries(_BACKOFF, self._clock)
        while True:
            verdict = await check_device(self._argv, limit_s=self._limit_s)
            if verdict != self._verdict:
                level = logging.INFO if verdict.is_available else logging.ERROR
                log.log(
                    level, "metal checked", extra={"reason": verdict.reason, "why": verdict.message}
                )
            self._verdict = verdict
            self._has_verdict.set()
            on_change()
            if verdict.is_available:
                return
            await retries.wait()

    def fill(self, status: NodeStatus, before: NodeStatus | None) -> NodeStatus:
        """Return the status with the condition; `before` is the one in the store, whose time stays while its truth does."""
        if self._verdict is None:
            return status
        new = Condition(
            type=METAL_AVAILABLE,
            status=ConditionStatus.TRUE if self._verdict.is_available else ConditionStatus.FALSE,
            reason=self._verdict.reason,
            message=self._verdict.message,
            last_transition_time=self._clock.now(),
        )
        old = None if before is None else find_condition(before.conditions, METAL_AVAILABLE)
        if old is not None:
            new = with_condition((old,), new)[0]
        return status.model_copy(
            update={
                "conditions": with_condition(status.conditions, new),
                "mlx_build": self._verdict.build,
                "metal_device": self._verdict.device,
            }
        )


def preflight_of(
    clock: Clock, state_dir: Path, platform: str = sys.platform
) -> MetalPreflight | None:
    """Return the preflight of this machine, which keeps what it measures; None where MLX computes on the processor."""
    argv = (sys.executable, "-m", engine_config.DEVICE_CHECK_MODULE, str(state_dir))
    return MetalPreflight(clock, argv) if platform == "darwin" else None
