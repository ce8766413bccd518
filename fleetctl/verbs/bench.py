"""The verb `fleetctl bench`: speed of a model through a gateway, at several concurrencies and prompt lengths."""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from typing_extensions import override

from fleetctl.chat import answer_stream
from fleetctl.chat.gateway_pool import GatewayPool, print_note
from fleetctl.chat.load_run import Load, LoadGenerator, LoadResult
from fleetctl.cli.arguments import output_option, parse_duration, timeout_option
from fleetctl.cli.connect import gateway_options, run
from fleetctl.cli.errors import FleetctlError
from fleetctl.output import printers
from fleetctl.verbs.chat import choose_model, open_gateways
from machinery.clock import Clock, SystemClock
from machinery.version import version

_HELP = """Measure the speed of a model: time to the first token and tokens per second, as clients see them.

\b
  fleetctl bench qwen
  fleetctl bench qwen --concurrency 1,8,32 --prompt-tokens 128,4096 -o json > before.json
  fleetctl bench qwen --compare before.json          now, and how much faster than before
  fleetctl bench --read after.json --compare before.json

Each combination is measured with its own requests, each of which has a prompt of its own: caches do not help. Answers
have exactly --output-tokens. The load is real: other clients of the model wait. The exit code is 1 if a request fails.
"""
_TITLES: Final = (
    "CONCURRENCY",
    "PROMPT",
    "OUTPUT",
    "REQUESTS",
    "FAILED",
    "FIRST p50",
    "FIRST p95",
    "TOKENS/S STREAM",
    "TOKENS/S ALL",
)
_MOST_CELLS: Final = 50
_FILE_BYTES: Final = 1 << 20


class BenchRun(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A whole run, as `-o json` prints it."""

    model: str
    release: str
    output_tokens: int
    results: list[LoadResult]


class _Numbers(click.ParamType[tuple[int, ...]]):
    """Positive numbers, separated by commas."""

    name = "N,N"

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers; fail on others."""
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        if not all(word.isdecimal() and 0 < int(word) <= 1_000_000 for word in words):
            self.fail(f"{value}: positive numbers separated by commas, such as 1,8,32", param, ctx)
        return tuple(map(int, words))


@click.command(help=_HELP, short_help="Measure the speed of a model through a gateway.")
@click.argument("model", required=False)
@click.option(
    "--concurrency",
    type=_Numbers(),
    default="1,4,16",
    show_default=True,
    help="Requests at once.",
)
@click.option(
    "--prompt-tokens",
    type=_Numbers(),
    default="128,1024",
    show_default=True,
    help="Lengths of prompts.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(1, 100_000),
    default=64,
    show_default=True,
    help="Length of each answer.",
)
@click.option(
    "--requests",
    type=click.IntRange(1, 100_000),
    help="Requests of each combination (default: twice the concurrency, and at least 4).",
)
@click.option(
    "--limit",
    default="5m",
    show_default=True,
    help="After this time no further combination is begun.",
)
@timeout_option("5m", "Longest time without data from the gateway.")
@click.option("--compare", type=click.Path(path_type=Path), help="An earlier run (-o json).")
@click.option(
    "--read", type=click.Path(path_type=Path), help="Show this run (-o json); measure nothing."
)
@output_option("table", "json")
@gateway_options
def bench(
    model: str | None, compare: Path | None, read: Path | None, output: str, **options: Any
) -> None:
    """Measure the speed of a model through a gateway."""
    before = None if compare is None else read_run(compare)
    if read is not None:
        if model is not None:
            raise click.UsageError("--read shows a run that was measured; leave MODEL out")
        bench_run = read_run(read)
    else:
        bench_run = _measure(model, options)
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(bench_run), indent=2).decode())
    else:
        click.echo(run_text(bench_run, before))
    for result in bench_run.results:
        if result.error:
            click.echo(
                f"error: {result.failed} of {result.requests} failed: {result.error}", err=True
            )
    if any(result.failed for result in bench_run.results):
        sys.exit(1)


def _measure(model: str | None, options: dict[str, Any]) -> BenchRun:
    pool = open_gateways(options)
    if model is None:
        model = choose_model(run(pool.send(answer_stream.list_models)), can_ask=False)
    loads = [
        Load(concurrency=concurrency, prompt_tokens=tokens)
        for tokens in options["prompt_tokens"]
        for concurrency in options["concurrency"]
    ]
    if len(loads) > _MOST_CELLS:
        raise click.UsageError(f"{len(loads)} combinations are too many; {_MOST_CELLS} at most")
    results = run(_measure_all(pool, SystemClock(), model, loads, options))
    return BenchRun(
        model=model, release=version(), output_tokens=options["output_tokens"], results=results
    )


async def _measure_all(
    pool: GatewayPool, clock: Clock, model: str, loads: Sequence[Load], options: dict[str, Any]
) -> list[LoadResult]:
    ends_s = clock.monotonic() + parse_duration(options["limit"])
    generator = LoadGenerator(
        pool=pool,
        clock=clock,
        model=model,
        output_tokens=options["output_tokens"],
        dice=random.Random(),
    )
    generator = await generator.calibrated()
    results: list[LoadResult] = []
    for number, load in enumerate(loads, 1):
        if results and clock.monotonic() >= ends_s:
            print_note(f"--limit {options['limit']}: {len(loads) - len(results)} left out")
            break
        print_note(
            f"{number} of {len(loads)}: {load.concurrency} at once, prompts of {load.prompt_tokens} tokens"
        )
        requests = options["requests"] or max(4, 2 * load.concurrency)
        results.append(await generator.measure(load, requests))
    return results


def read_run(path: Path) -> BenchRun:
    """Return a run that `-o json` printed.

    Raises:
        FleetctlError: the file cannot be read, or holds no run.

    """
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES + 1)
    except OSError as error:
        raise FleetctlError(f"cannot read {path}: {error.strerror}") from error
    if len(text) > _FILE_BYTES:
        raise FleetctlError(f"{path} is no run of `fleetctl bench`: it exceeds 1 MiB")
    try:
        return msgspec.json.decode(text, type=BenchRun)
    except msgspec.DecodeError as error:
        raise FleetctlError(f"{path} is no run of `fleetctl bench -o json`: {error}") from error


def run_text(found: BenchRun, before: BenchRun | None) -> str:
    """Return a run as a table; with an earlier run, each speed is followed by its ratio to the earlier one. Pure."""
    known = {result.load: result for result in before.results} if before is not None else {}
    rows = [_cells(result, known.get(result.load)) for result in found.results]
    table = printers.align_columns(rows, _TITLES)
    if before is None:
        return table
    note = f"x: ratio to the run of {before.model} with release {before.release}; more is faster"
    if before.output_tokens != found.output_tokens:
        note += (
            f". Its answers had {before.output_tokens} tokens, these {found.output_tokens}: "
            "throughputs cannot be compared"
        )
    return f"{table}\n{note}"


def _cells(one: LoadResult, before: LoadResult | None) -> tuple[str, ...]:
    now, old = _speeds(one), _speeds(before)
    first, slow, stream, whole = now
    return (
        str(one.load.concurrency),
        _number(one.prompt_tokens, 0),
        _number(one.output_tokens, 0),
        str(one.requests),
        str(one.failed),
        _seconds(first) + _ratio(old[0], first),
        _seconds(slow) + _ratio(old[1], slow),
        _number(stream, 1) + _ratio(stream, old[2]),
        _number(whole, 1) + _ratio(whole, old[3]),
    )


def _speeds(
    one: LoadResult | None,
) -> tuple[float | None, float | None, float | None, float | None]:
    if one is None:
        return None, None, None, None
    return (
        one.first_token_seconds_p50,
        one.first_token_seconds_p95,
        one.stream_tokens_per_second,
        one.output_tokens_per_second,
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}s"


def _ratio(faster: float | None, slower: float | None) -> str:
    return f" (x{faster / slower:.2f})" if faster and slower else ""
