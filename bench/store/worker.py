"""One client in a process of its own: takes orders on stdin, answers with figures on stdout.

    python -m bench.store.worker CLIENT OPTION URL PID_OF_ETCD

An order and an answer are one JSON object on one line each.
"""

import asyncio
import importlib
import json
import os
import resource
import sys
from typing import TextIO

import psutil
import uvloop

from bench.store.meter import Stage
from bench.store.workloads import WORKLOADS


async def serve(stage: Stage, answers: TextIO) -> None:
    """Work off the orders until there are no more."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        try:
            figures = await WORKLOADS[order.pop("work")](stage, **order)
            answer: dict[str, object] = {"figures": figures}
        except Exception as error:  # noqa: BLE001 - peers raise what they like; it is their result
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


async def run(name: str, option: str, url: str, pid: str, answers: TextIO) -> None:
    module = importlib.import_module(f"bench.store.clients.{name}")
    stage = Stage(
        client=await module.connect(url, option),
        connect=lambda: module.connect(url, option),
        etcd=psutil.Process(int(pid)),
        folder=f"/bench/{name}-{option}/",
    )
    print(json.dumps({"figures": {}}), file=answers, flush=True)
    await serve(stage, answers)
    await stage.client.close()


def main() -> None:
    """Run until stdin ends."""
    # What a client prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
    name, option, url, pid = sys.argv[1:]
    # All on the loop of our own processes: no peer was dearer on it than on asyncio's (measured).
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(name, option, url, pid, answers))


if __name__ == "__main__":
    main()
