"""The verb `fleetctl demo`: starts a fleet, deploys a model and streams a reply."""

import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import click
from rich.console import Console
from rich.markup import escape

import examples
from fleetctl.cli import terminal
from fleetctl.cli.connect import data_dir_option, etcd_dir
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import lifecycle
from fleetctl.fleets.data_dir import DataDir, FleetRecord
from fleetctl.fleets.local_fleet import why_unusable
from fleetctl.fleets.local_programs import DASHBOARD_PORT
from fleetctl.verbs import local_context
from fleetctl.verbs.dashboard import find_dashboard
from machinery.clock import SystemClock
from machinery.control_characters import make_printable
from machinery.environment import environment_without_secrets
from schemas.deployment import ModelDeployment
from schemas.meta import find_condition, is_true
from schemas.wire import headers, streams
from store import objects
from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.sockets import client_socket
from store.port import Transport

_MODEL = "SmolLM2-135M-Instruct"
_NAME = "smollm2"
_QUESTION = "What is the capital of France? Answer in one sentence."
_AVAILABLE_S = 300.0
_REPLY_S = 180.0
_DASHBOARD_S = 30.0


@click.command(short_help="Start a fleet of two nodes with a small model, and chat.")
@data_dir_option
@click.option("--port", type=click.IntRange(1, 65535), default=4000, show_default=True)
@click.option("--once", is_flag=True, help="Stop the fleet at the end.")
def demo(data_dir: Path, port: int, once: bool) -> None:
    """Start a fleet of two nodes, deploy a small model, and chat with it."""
    steps = StepReporter()
    folder = DataDir(data_dir)
    folder.prepare()
    # Create the model folder in a child process: the conversion imports mlx, which this process must not.
    target = folder.models / _MODEL
    command = [sys.executable, "-m", "examples.models.smollm2", str(target)]
    with steps.step(f"preparing the model {_MODEL} (98 MB, downloaded once)") as step:
        # Its standard output is the folder's path, for scripts; progress is on standard error.
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment_without_secrets(),
        )
        assert process.stderr is not None
        lines = [line.strip() for line in _report_lines(process.stderr, step)]
        if process.wait() != 0:
            raise FleetctlError(f"preparing the model failed: {' '.join(lines[-3:])}")
    record = folder.read()
    existing = record if record is not None and record.is_ready and folder.is_locked() else None
    if existing is not None:
        steps.say(f"a fleet already runs in {folder.path}; using it")
    fleet = existing or _start(steps, folder, port)
    try:
        _deploy(steps, folder, fleet)
        for kind in ("nodes", "modeldeployments"):
            click.echo(f"$ fleetctl get {kind}")
            _fleetctl(folder, "get", kind)
        steps.say(f"asking {_NAME} through the gateway: {_QUESTION}")
        asyncio.run(_chat(fleet.gateway_url))
        if not once:
            local_context.enter(folder)
            request = json.dumps(
                {"model": _NAME, "messages": [{"role": "user", "content": "Hello!"}]}
            )
            click.echo(
                f"\nThe fleet keeps running: {fleet.gateway_url}/v1\n"
                f"  curl {fleet.gateway_url}/v1/chat/completions -H 'content-type: application/json' \\\n"
                f"    -d '{request}'\n\n"
                f"  fleetctl get modeldeployments      # in {Path(sys.executable).parent}\n\n"
                f"Stop it with: fleetctl down --data-dir {shlex.quote(str(folder.path))}\n"
            )
            # Print a link to the dashboard.
            try:
                asyncio.run(_wait_for_dashboard(folder))
                click.echo(
                    "Look at it in a browser with `fleetctl dashboard`, or within a minute here, logged in once:"
                )
                _fleetctl(folder, "dashboard", "--link")
            except FleetctlError as error:
                click.echo(
                    f"The dashboard is not there yet: {error}. Try `fleetctl dashboard` later."
                )
            return
    except BaseException:
        # A fleet that already ran is not stopped because a later step failed.
        if existing is None:
            steps.say("shutting down")
            asyncio.run(lifecycle.stop_fleet(folder, SystemClock()))
        raise
    with steps.step("shutting down"):
        asyncio.run(lifecycle.stop_fleet(folder, SystemClock()))


class StepReporter:
    """Progress output: a spinner on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._console = Console(file=terminal.unfiltered(sys.stdout), highlight=False)

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(make_printable(text), markup=False, soft_wrap=True)

    @contextmanager
    def step(self, text: str) -> Iterator["DemoStep"]:
        """Show a step while it runs, and how long it took."""
        clock = SystemClock()
        began = clock.monotonic()
        if not self._console.is_terminal:
            self.say(f"{text} ...")
            yield DemoStep(self.say)
        else:
            with self._console.status(escape(text)) as status:
                yield DemoStep(
                    lambda detail: status.update(escape(make_printable(f"{text}: {detail}")))
                )
        self.say(f"{text}: done in {clock.monotonic() - began:.1f} s")


class DemoStep:
    """A running step; repeats of the same detail are shown once."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._last = ""

    def detail(self, text: str) -> None:
        """Show what the step is doing."""
        if text and text != self._last:
            self._last = text
            self._show(text)


def _dashboard_port() -> int:
    """Return the usual port of a dashboard, or 0, any free one, where another process has it."""
    return 0 if why_unusable("127.0.0.1", DASHBOARD_PORT) else DASHBOARD_PORT


def _report_lines(output: Iterable[str], step: DemoStep) -> Iterator[str]:
    for line in output:
        step.detail(line.strip())
        yield line


def _start(steps: StepReporter, folder: DataDir, port: int) -> FleetRecord:
    flags = (
        *("--nodes", "2", "--models-dir", str(folder.models)),
        *("--port", str(port), "--agent-port", "0", "--dashboard-port", str(_dashboard_port())),
    )
    with steps.step("starting etcd, a reconciler, two node agents and a gateway"):
        fleet = lifecycle.start_detached(folder, flags, SystemClock())
    if fleet.warning:
        steps.say(f"note: {fleet.warning}")
    return fleet


def _deploy(steps: StepReporter, folder: DataDir, fleet: FleetRecord) -> None:
    manifests = Path(examples.__file__).parent / "quickstart"
    steps.say(f"$ fleetctl apply -f examples/{manifests.name}")
    _fleetctl(folder, "apply", "-f", str(manifests))
    with steps.step("waiting until the deployment is Available") as step:
        asyncio.run(_wait_available(folder, fleet.gateway_url, step))


def _fleetctl(folder: DataDir, *words: str) -> None:
    """Run a verb as a user would."""
    command = [sys.executable, "-m", "fleetctl", *words, "--data-dir", str(folder.path)]
    sys.stdout.flush()
    done = subprocess.run(command, check=False, env=environment_without_secrets())
    if done.returncode != 0:
        raise FleetctlError(f"`fleetctl {' '.join(words)}` failed with exit code {done.returncode}")


@asynccontextmanager
async def _store(folder: DataDir) -> AsyncIterator[Transport]:
    """Connect to the store of the fleet in the folder. Raises FleetctlError if it fails."""
    transport = connect(EtcdAddress(socket=client_socket(etcd_dir(folder.path))))
    try:
        yield transport
    except StoreError as error:
        raise FleetctlError(f"the store failed while waiting: {error}") from error
    finally:
        await transport.close()


async def _wait_available(folder: DataDir, url: str, step: DemoStep) -> None:
    clock = SystemClock()
    deadline = clock.monotonic() + _AVAILABLE_S
    async with _store(folder) as transport:
        while True:
            obj = await objects.get(transport, ModelDeployment, _NAME)
            conditions = obj.status.conditions if obj and obj.status else ()
            available = find_condition(conditions, "Available")
            # Ask the gateway as well: the status may be left over from an earlier run.
            if is_true(conditions, "Available") and obj is not None:
                ready = await _ready_replicas(url)
                if ready >= obj.spec.replicas:
                    return
            why = available.message if available is not None else "not observed yet"
            step.detail(why)
            if clock.monotonic() >= deadline:
                raise FleetctlError(f"not Available after {_AVAILABLE_S:.0f} s: {why}")
            await clock.sleep(0.2)


async def _ready_replicas(url: str) -> int:
    """Return how many replicas of the model the gateway can reach."""
    timeout = aiohttp.ClientTimeout(total=5.0)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/health") as response,
        ):
            models = (await response.json())["models"]
            return int(models.get(_NAME, {}).get("ready", 0))
    except (aiohttp.ClientError, TimeoutError, OSError):
        return 0


async def _chat(url: str) -> None:
    """Send one request and print the reply as it streams.

    Raises:
        FleetctlError: no reply, or an empty one.

    """
    body = {
        "model": _NAME,
        "messages": [{"role": "user", "content": _QUESTION}],
        "stream": True,
        "max_tokens": 64,
        "temperature": 0,
    }
    timeout = aiohttp.ClientTimeout(total=_REPLY_S)
    words = 0
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            if response.status != 200:
                raise FleetctlError(f"the gateway refused the request: {await response.text()}")
            node = response.headers.get(headers.NODE, "?")
            async for text in _texts(response.content):
                words += bool(text)
                click.echo(text, nl=False)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise FleetctlError(f"the request failed: {type(error).__name__} {error}") from error
    click.echo(f"\n(answered by {node})")
    if not words:
        raise FleetctlError("the reply was empty")


async def _texts(lines: aiohttp.StreamReader) -> AsyncIterator[str]:
    async for line in lines:
        if not line.startswith(streams.DATA) or line.startswith(streams.DONE.rstrip()):
            continue
        event = json.loads(line.removeprefix(streams.DATA))
        if "error" in event:
            raise FleetctlError(f"the reply was interrupted: {event['error']['message']}")
        for choice in event.get("choices", ()):
            yield choice["delta"].get("content") or ""


async def _wait_for_dashboard(folder: DataDir) -> None:
    """Wait until the dashboard listens, which takes seconds on a slow machine. Raises FleetctlError."""
    clock = SystemClock()
    deadline = clock.monotonic() + _DASHBOARD_S
    async with _store(folder) as transport:
        while True:
            try:
                await find_dashboard(transport)
            except FleetctlError:
                if clock.monotonic() >= deadline:
                    raise
            else:
                return
            await clock.sleep(0.2)
