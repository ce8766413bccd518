"""`python -m bench.gateway [speed]`; `bench.gateway.faults` and `bench.gateway.hostile` are run by their own names."""

import asyncio

from bench.gateway.speed import main

if __name__ == "__main__":
    asyncio.run(main())
