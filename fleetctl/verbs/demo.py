"""The verb `fleetctl demo`: starts a fleet, deploys a model and asks it, with the commands that a user types."""

import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

import examples
from fleetctl.cli import terminal
from fleetctl.cli.connect import data_dir_option
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import lifecycle
from fleetctl.fleets.data_dir import DataDir, FleetRecord
from fleetctl.fleets.local_fleet import why_unusable
from fleetctl.fleets.local_programs import DASHBOARD_PORT
from fleetctl.verbs import local_context
from machinery.clock import SystemClock
from machinery.control_characters import make_printable
from machinery.environment import environment_without_secrets

_MODEL = "SmolLM2-135M-Instruct"
_NAME = "smollm2"
_QUESTION = "What is the capital of France? Answer in one sentence."
_MANIFESTS = Path(examples.__file__).parent / "quickstart"
# A status may be left over from an earlier run; an endpoint is leased.
_COMMANDS = (
    ("apply", "-f", str(_MANIFESTS)),
    ("wait", f"md/{_NAME}", "--for=condition=Available", "--timeout=5m"),
    ("wait", "endpoints", "-l", f"fleet/deployment={_NAME}", "--for=create", "--timeout=5m"),
    ("get", "nodes"),
    ("get", "modeldeployments"),
    ("chat", _NAME, "-m", _QUESTION, "--temperature", "0"),
)


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
    with steps.step(f"preparing the model {_MODEL} (98 MB, downloaded once)") as tell:
        # Its standard output is the folder's path, for scripts; progress is on standard error.
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment_without_secrets(),
        )
        assert process.stderr is not None
        lines: list[str] = []
        for line in map(str.strip, process.stderr):
            if line and line not in lines[-1:]:
                lines.append(line)
                tell(line)
        if process.wait() != 0:
            raise FleetctlError(f"preparing the model failed: {' '.join(lines[-3:])}")
    record = folder.read()
    existing = record if record is not None and record.is_ready and folder.is_locked() else None
    if existing is not None:
        steps.say(f"a fleet already runs in {folder.path}; using it")
    fleet = existing or _start(steps, folder, port)
    try:
        for words in _COMMANDS:
            steps.say(f"$ fleetctl {shlex.join(words)}")
            _fleetctl(folder, *words)
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
            click.echo(
                "Look at it in a browser with `fleetctl dashboard`, or within a minute here, logged in once:"
            )
            try:
                _fleetctl(folder, "dashboard", "--link")
            except FleetctlError:
                click.echo("The dashboard is not there yet; try `fleetctl dashboard` later.")
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
    def step(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show a step while it runs, with the details that the yielded function gets, and how long it took."""
        clock = SystemClock()
        began = clock.monotonic()
        if not self._console.is_terminal:
            self.say(f"{text} ...")
            yield self.say
        else:
            with self._console.status(escape(text)) as status:
                yield lambda detail: status.update(escape(make_printable(f"{text}: {detail}")))
        self.say(f"{text}: done in {clock.monotonic() - began:.1f} s")


def _dashboard_port() -> int:
    """Return the usual port of a dashboard, or 0, any free one, where another process has it."""
    return 0 if why_unusable("127.0.0.1", DASHBOARD_PORT) else DASHBOARD_PORT


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


def _fleetctl(folder: DataDir, *words: str) -> None:
    """Run a verb as a user would."""
    command = [sys.executable, "-m", "fleetctl", *words, "--data-dir", str(folder.path)]
    sys.stdout.flush()
    done = subprocess.run(command, check=False, env=environment_without_secrets())
    if done.returncode != 0:
        raise FleetctlError(f"`fleetctl {' '.join(words)}` failed with exit code {done.returncode}")
