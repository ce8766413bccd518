"""Cheap collection: every worker of a run imports all test modules before it runs the first test."""

import contextlib
import gc
import importlib
import os
from pathlib import Path

import pytest


def begin() -> None:
    """Stop garbage collection while modules are imported: nothing of them is garbage."""
    gc.disable()


def end() -> None:
    """Start garbage collection again, without the collected objects: they live as long as the run."""
    gc.freeze()
    gc.enable()


def share_compilation(config: pytest.Config) -> None:
    """Import all test modules in an order of this worker's own, if this is a worker of a run of all tests.

    pytest compiles a module for its assertions and keeps the result in a file. Workers that import in the same order
    compile every module at the same time. Here each begins elsewhere, and finds what the others have compiled.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not worker or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    names = [
        ".".join(path.relative_to(config.rootpath).with_suffix("").parts)
        for path in sorted(Path(config.rootpath, "tests").rglob("test_*.py"))
    ]
    begin_at = len(names) * int(worker) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for name in (*names[begin_at:], *names[:begin_at]):
        # Collection imports it again, and reports what is wrong.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)
