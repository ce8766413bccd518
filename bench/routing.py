"""Cost of the choice of an engine: `make bench-routing`. No store, no network: the gateway's own Router alone.

By engines (10 to 1,000, every strategy), by conversations that are remembered (none to a million) and by the length of
prompts. Prints tables, and as its last line one JSON object, ratios first.
"""

import gc
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import get_args

from bench.result import finish, sized
from gateway.forwarding.router import LoadTracker, Router
from gateway.request import InferenceRequest
from gateway.routing.table import BackendBuilder, EngineEndpoint, RoutingTable, ServedModel
from gateway.state.table_cache import TableCache
from machinery.clock import SystemClock
from schemas.routing import Routing, Strategy
from schemas.wire.engine_address import EngineAddress
from store.memory import MemoryTransport

ENGINES = (10, 100, 1000)
SESSIONS = sized((0, 10_000, 1_000_000), smoke=(0, 100, 1_000))
PROMPTS = sized((100, 1_000, 10_000, 100_000), smoke=(100, 1_000))
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
ROUNDS, CHOICES = sized((15, 300), smoke=(2, 20))
_NOBODY: frozenset[EngineEndpoint] = frozenset()


def router(engines: int, strategy: Strategy = "Scored") -> Router:
    """Return one that has two requests at each engine on average, and hears of others at half of them."""
    draws = random.Random(engines)
    routing = Routing(strategy=strategy)
    targets = [
        EngineEndpoint(
            replica=f"m-{n}",
            node=f"mac-{n}",
            deployment="m",
            origin=EngineAddress(f"10.0.{n // 250}.{n % 250}", 4100),
            names=("m",),
            version=n,
            points=draws.uniform(20, 200),
        )
        for n in range(engines)
    ]
    share = BackendBuilder().backend(("m",), leased=targets, routing=routing)
    model = ServedModel(
        name="m",
        created=0,
        backends=(share,),
        reason="",
        routing=routing,
        session_s=300.0,
        is_prefix_aware=share.uses_prefixes,
    )
    clock = SystemClock()
    keeper = TableCache(MemoryTransport(clock), clock)
    keeper.table = RoutingTable(models=MappingProxyType({"m": model}), endpoints=engines)
    loads = LoadTracker(draws)
    for target in draws.choices(targets, k=2 * engines):
        loads.begin(target)
    for target in targets[::2]:
        told = {b"x-fleet-in-flight": b"%d" % draws.randint(0, 9), b"x-fleet-queued": b"0"}
        loads.record_report(target.origin, told, clock.monotonic())
    return Router(table_cache=keeper, load_tracker=loads, clock=clock, random=draws)


def asks(size: int = 100, sessions: int = 0) -> list[InferenceRequest]:
    """Return requests whose prompts have so many bytes and begin alike by half; or of so many sessions."""
    draws = random.Random(size)
    made = []
    for _ in range(CHOICES):
        messages = [
            {"role": "system", "content": "s" * (size // 2)},
            {"role": "user", "content": f"{draws.random()} ".ljust(size // 2 - 60, "u")},
        ]
        name = f"session-{draws.randrange(sessions)}" if sessions else ""
        prompt = json.dumps(messages).encode()
        made.append(
            InferenceRequest(
                path="/", model="m", body=b"", request_id=b"", session=name, prompt=prompt
            )
        )
    return made


def fill(into: Router, sessions: int) -> float:
    """Fill the session table with this number; return the bytes that each session took."""
    before = _resident_bytes()
    for number in range(sessions):
        name = f"session-{number}"
        one = InferenceRequest(path="/", model="m", body=b"", request_id=b"", session=name)
        into.choose(one, _NOBODY, into.draw())
    return (_resident_bytes() - before) / max(1, sessions)


def timed(cases: Sequence[tuple[Router, list[InferenceRequest]]]) -> list[float]:
    """Return the microseconds of CPU of one choice in each case; they take turns, so that all have the same noise."""
    spent: list[list[float]] = [[] for _ in cases]
    gc.disable()
    for _ in range(ROUNDS):
        for (chooser, some), times in zip(cases, spent, strict=True):
            began = time.thread_time()
            for one in some:
                chooser.choose(one, _NOBODY, chooser.draw())
            times.append((time.thread_time() - began) / len(some) * 1e6)
    gc.enable()
    # Of what a busy machine adds nothing belongs to the choice.
    return [statistics.quantiles(times, n=4)[0] for times in spent]


def main() -> None:
    """Measure and print."""
    by_engines: dict[str, dict[int, float]] = {}
    for strategy in STRATEGIES:
        cases = [(router(count, strategy), asks()) for count in ENGINES]
        by_engines[strategy] = dict(zip(ENGINES, timed(cases), strict=True))
    _print("us a choice, by engines", by_engines)

    remembering = [router(1000) for _ in SESSIONS]
    each = [fill(one, count) for one, count in zip(remembering, SESSIONS, strict=True)]
    sessions = [
        (one, asks(sessions=max(1, n))) for one, n in zip(remembering, SESSIONS, strict=True)
    ]
    by_sessions = dict(zip(SESSIONS, timed(sessions), strict=True))
    _print("us a choice, by sessions that are remembered (1,000 engines)", {"Scored": by_sessions})
    print(f"bytes a session: {each[1]:.0f} of 10,000, {each[2]:.0f} of a million\n")

    prompts = [(router(10), asks(size)) for size in PROMPTS]
    by_prompt = dict(zip(PROMPTS, timed(prompts), strict=True))
    _print("us a choice, by bytes of the prompt (10 engines)", {"Scored": by_prompt})

    ratios = {name: round(found[1000] / found[10], 2) for name, found in by_engines.items()}
    compared = {
        "ratio_1000_to_10_engines": ratios,
        "ratio_1000000_to_10000_sessions": round(
            by_sessions[SESSIONS[2]] / by_sessions[SESSIONS[1]], 2
        ),
    }
    figures = {
        "bytes_per_session_of_1000000": round(each[2]),
        "us_by_engines": _rounded(by_engines),
        "us_by_sessions": {n: round(us, 1) for n, us in by_sessions.items()},
        "us_by_prompt_bytes": {n: round(us, 1) for n, us in by_prompt.items()},
    }
    finish("routing", compared, figures)


def _rounded(found: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    return {name: {n: round(us, 1) for n, us in row.items()} for name, row in found.items()}


def _print(title: str, found: dict[str, dict[int, float]]) -> None:
    print(title)
    columns = next(iter(found.values()))
    print("".ljust(16) + "".join(f"{n:>12,}" for n in columns))
    for name, row in found.items():
        print(name.ljust(16) + "".join(f"{us:12.1f}" for us in row.values()))
    print()


def _resident_bytes() -> int:
    """Return the most that this process has had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    main()
