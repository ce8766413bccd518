"""`fleetctl fabric bench`: how fast, and whether rightly, the Macs of a group sum arrays together."""

import re
import sys
from collections.abc import Callable
from typing import Any

import click
import orjson
from pydantic import TypeAdapter, ValidationError

from fleetctl.connect import run, store_options
from fleetctl.fabric import bench_fleet, bench_local, bench_text
from fleetctl.fabric.bench_text import Wanted
from schemas.fabrictest import QUICK_SIZES, SIZES, Sizes
from schemas.shardgroup import MOST_RANKS

_HELP = """Sum arrays of 4 KB to 64 MB over the cables of a group: are the sums right, how long does one take, how much
goes through in a second.

\b
  fleetctl fabric bench studios
  fleetctl fabric bench studios --stress -o json
  fleetctl fabric bench --local 2

Each Mac's agent starts a process of its own for it, as for a rank of a model; what models do meanwhile makes it slower,
and is made slower. The figures are those of the slowest rank. Over JACCL more than 5 GB/s at 64 MB are expected. What
came out becomes the condition FabricHealthy of the Macs. Exit code 1: a sum was wrong, or the speed is not what the
cables give.

--local runs N ranks on this machine over its loopback, without a fleet: whether MLX's ring works here, and how fast
it can be at most.
"""
_UNITS = {"": 1, "k": 2**10, "m": 2**20}


def _sizes(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Return the bytes that --sizes says."""
    if value is None:
        return None
    found = []
    for text in value.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,10})\s*([kKmM]?)(?:i?[bB])?\s*", text)
        if match is None:
            raise click.BadParameter(f"{text!r} is no size; write such as 4K,256K,4M,64M")
        found.append(int(match[1]) * _UNITS[match[2].lower()])
    try:
        return TypeAdapter(Sizes).validate_python(tuple(dict.fromkeys(found)))
    except ValidationError as error:
        raise click.BadParameter(error.errors()[0]["msg"]) from error


@click.command(help=_HELP)
@click.argument("group", required=False)
@click.option(
    "--local",
    type=click.IntRange(2, MOST_RANKS),
    metavar="N",
    help="N ranks on this machine instead of a group.",
)
@click.option("--quick", "pace", flag_value="quick", help="4 sizes, 5 rounds.")
@click.option("--stress", "pace", flag_value="stress", help="8 sizes, 100 rounds.")
@click.option(
    "--rounds", type=click.IntRange(1, 10_000), help="How often each size is summed (else 20)."
)
@click.option("--sizes", callback=_sizes, metavar="SIZE,...", help="Such as 4K,256K,4M,64M.")
@click.option("--verbose", is_flag=True, help="Every rank, and what each of its rounds took.")
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@store_options
def bench(
    group: str | None,
    local: int | None,
    pace: str | None,
    verbose: bool,
    output: str,
    **options: Any,
) -> None:
    """Run the test, and print what came out."""
    if group is not None and local is not None:
        raise click.UsageError("name a group, or give --local: one of them")
    told = _teller(verbose=verbose and output == "table")
    wanted = _wanted(pace, options["sizes"], options["rounds"])
    if local is not None:
        result = run(bench_local.measure(local, wanted, told))
    else:
        result = run(bench_fleet.measure(group, wanted, told, options))
    if output == "json":
        click.echo(orjson.dumps(bench_text.tree(result), option=orjson.OPT_INDENT_2))
    else:
        click.echo(bench_text.text(result, is_verbose=verbose))
    if not result.verdict.is_healthy:
        raise click.exceptions.Exit(1)


def _wanted(pace: str | None, sizes: tuple[int, ...] | None, rounds: int | None) -> Wanted:
    usual = {"quick": 5, "stress": 100}.get(pace or "", 20)
    return Wanted(
        sizes=sizes or (QUICK_SIZES if pace == "quick" else SIZES), rounds=rounds or usual
    )


def _teller(*, verbose: bool) -> Callable[[str], None]:
    """Return who tells how far it is: on a terminal, or if asked; what is printed at the end is for programs, too."""
    if verbose or sys.stderr.isatty():
        return lambda text: click.echo(text, err=True)
    return lambda _: None
