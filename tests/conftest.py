"""Fixtures and settings of every test: sampling profiles, models for whole fleets, the order of files."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from engine.linux import blas
from tests.support import forker, reaper, run_order
from tests.support.forked_workers import ForkedWorkers
from tests.support.golden_cases import Golden
from tests.support.sampling import FULL

pytest_plugins = ["tests.support.models"]

# How long examples take says something about the machine, not about the code.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Derandomized: the default tier tries the same examples each time; the full tier looks for new ones.
settings.register_profile("default", _UNTIMED, derandomize=True, max_examples=20)
settings.register_profile("full", _UNTIMED, max_examples=1000)
settings.load_profile("full" if FULL else "default")

# A shell that starts the tests in the background lets them ignore Ctrl-C, and so their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A private folder with a path that is short enough for sockets, other than pytest's own."""
    with TemporaryDirectory(prefix="fleet-") as path:
        yield Path(path)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Golden files of messages, which `--update-golden` writes anew."""
    return Golden(is_update=bool(request.config.getoption("--update-golden")))


@pytest.hookimpl(trylast=True)
def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag --update-golden."""
    parser.addoption("--update-golden", action="store_true", help="Write tests/golden anew.")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run tests in forks where they are sound: xdist would collect all tests once more in each worker."""
    count = getattr(config.option, "numprocesses", None)
    if isinstance(count, int) and count > 1 and forker.is_sound() and not config.option.usepdb:
        config.pluginmanager.register(ForkedWorkers(count))
        config.option.numprocesses = 0


def pytest_configure() -> None:
    reaper.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take longest first, after everything else has been shuffled."""
    run_order.sort_by_length(items)


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(
    config: pytest.Config, log: Producer
) -> run_order.UnitScheduling | None:
    return run_order.UnitScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_sessionstart() -> None:
    """Stop garbage collection while modules are imported: nothing of them is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Start garbage collection again, without the collected objects: they live as long as the run."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def garbage_of_a_file() -> Iterator[None]:
    """Collect garbage when a file ends: a socket that it left open fails it, and not a file that runs later."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quick_blas(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Install the engines' BLAS for models that tests run in their own process, before MLX is imported."""
    if any(item.get_closest_marker("mlx") for item in request.session.items):
        base = tmp_path_factory.getbasetemp()
        blas.install((base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "blas")


@pytest.fixture(scope="session", autouse=True)
def forker_ends() -> Iterator[None]:
    yield
    forker.SHARED.end()
