"""A small process that ends as its argument says."""

import asyncio
import sys

from machinery import process_log
from machinery.process_main import run_until_signal


async def main() -> None:
    print("up", flush=True)
    match sys.argv[1]:
        case "returns":
            return
        case "fails":
            raise RuntimeError("a defect")
        case "hangs":
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.Event().wait()
        case "groups":
            async with asyncio.TaskGroup() as group:
                group.create_task(failing())
        case _:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                print("cleaned up", flush=True)


async def failing() -> None:
    raise RuntimeError("a defect in a task")


if __name__ == "__main__":
    process_log.setup("daemon")
    sys.exit(run_until_signal(main, grace_s=1.0))
