"""The command `python -m nodeagent.hollow`: hollow agents against a real store. Flags and wiring only."""

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import click

from machinery import process_log
from machinery.clock import SystemClock
from machinery.log_flags import LOG_FORMAT, LOG_LEVEL
from machinery.options import options
from machinery.process_log import LogFormat, LogLevel
from machinery.process_main import GRACE_S, run_until_signal
from machinery.process_secrets import disable_core_dumps
from nodeagent.hardware.hollow_status import hollow_status
from nodeagent.hollow.engines import HollowTiming
from nodeagent.hollow.node import HollowMac, SharedCaches
from schemas import quantity
from schemas.node import ModelGeometry, ModelReport
from store.etcd.authentication import Authentication
from store.etcd.connect import connect
from store.etcd.flags import address_from_flags, etcd_options
from store.leases import LEASE_TTL_S

# The geometry that every model path has: 8 billion parameters in 4 bits, as Llama 3.1 8B.
_MODEL_GEOMETRY = ModelGeometry(
    model_type="llama",
    weights_bytes=4_500_000_000,
    layers=32,
    kv_heads=8,
    head_dim=128,
    kv_element_bytes=2,
    vocab_size=128_256,
    max_context=131_072,
    parameters=8_030_000_000,
    hidden_size=4096,
    ffn_size=14_336,
    heads=32,
)

# A connection renews one lease after another; a thousand in turn would take longer than a lease lasts.
_MACS_PER_CONNECTION = 25


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@etcd_options
@click.option("--count", type=click.IntRange(1, 100_000), default=1, show_default=True)
@click.option("--name", default="hollow", show_default=True, help="Nodes are named NAME-0 and up.")
@click.option("--first", type=click.IntRange(0), default=0, help="Number of the first node.")
@click.option("--chip", default="Apple M4 Pro", show_default=True)
@click.option("--memory", default="48Gi", show_default=True, help="Unified memory of each node.")
@click.option("--load", type=float, default=2.0, show_default=True, help="Seconds to load a model.")
@click.option(
    "--lease",
    type=click.IntRange(1),
    default=LEASE_TTL_S,
    show_default=True,
    help="Lifetime of each lease in seconds; raise it if this machine is too slow to renew all leases in time.",
)
@options("FLEET", replace(LOG_LEVEL, default="warning"), LOG_FORMAT)
def main(log_level: LogLevel, log_format: LogFormat, **options: Any) -> None:
    """Run many agents with simulated engines in one process, for load tests. Their endpoints do not answer."""
    disable_core_dumps()
    process_log.setup("hollow", log_level, log_format=log_format)
    where, clock = address_from_flags(options), SystemClock()
    pace = HollowTiming(load_s=options["load"])
    last = options["first"] + options["count"]
    memory = quantity.parse(options["memory"])
    macs = [
        HollowMac(
            clock=clock,
            status=hollow_status(
                f"{options['name']}-{number}", chip=options["chip"], memory_bytes=memory
            ),
            models=lambda path: ModelReport(path=path, geometry=_MODEL_GEOMETRY),
            pace=lambda _: pace,
            lease_s=options["lease"],
            has_store_password=bool(where.password),
        )
        for number in range(options["first"], last)
    ]

    async def run() -> None:
        async with AsyncExitStack() as stack:
            authentication = Authentication(where)
            stack.push_async_callback(authentication.close)
            connections = [
                connect(where, authentication=authentication)
                for _ in range(0, len(macs), _MACS_PER_CONNECTION)
            ]
            for connection in connections:
                stack.push_async_callback(connection.close)
            feed = SharedCaches(connections[0], clock, shares_replicas=False)

            async def run_mac(number: int) -> None:
                # Agents that start together renew their leases together forever, and the last one of each burst is late.
                await clock.sleep(options["lease"] / 3 * number / len(macs))
                await macs[number].agent(connections[number // _MACS_PER_CONNECTION], feed).run()

            async with asyncio.TaskGroup() as group:
                group.create_task(feed.run())
                for number in range(len(macs)):
                    group.create_task(run_mac(number))

    sys.exit(run_until_signal(run, grace_s=GRACE_S))


if __name__ == "__main__":
    main()
