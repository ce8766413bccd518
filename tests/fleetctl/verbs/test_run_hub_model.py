"""fleetctl run ORGANISATION/NAME, create hubtoken, create --hub, rollout refresh, and a hub id in the wrong place."""

import asyncio
import io
from collections.abc import Awaitable, Callable
from pathlib import Path

from fleetctl.cli.terminal import ProgressLine
from fleetctl.verbs.run_hub_model import (
    ServingProgress,
    deploy_repository,
    is_hub_id,
    progress_text,
    wait_until_serving,
)
from machinery.clock import SystemClock
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.meta import Condition, ConditionStatus
from schemas.replica import FetchStatus
from store import codec, keys, objects
from store.port import Put
from tests.support.fleetctl_runner import MemoryFleet, run_fleetctl
from tests.support.ports import free_port
from tests.support.waiting import until_async

REPO = "mlx-community/Qwen3-8B-4bit"
NAME = "qwen3-8b-4bit"


async def read(fleet: MemoryFleet, name: str = NAME) -> ModelDeployment | None:
    return await objects.get(fleet.store, ModelDeployment, name)


async def set_available(fleet: MemoryFleet, reason: str, message: str, *, ready: int = 0) -> None:
    """Write the status of the deployment, as the reconciler does."""
    deployment = await until_async(lambda: read(fleet), what="the deployment")
    status = ModelDeploymentStatus(
        observed_generation=deployment.metadata.generation,
        ready_replicas=ready,
        conditions=(
            Condition(
                type="Available", status=ConditionStatus.FALSE, reason=reason, message=message
            ),
        ),
    )
    key = keys.status_key("ModelDeployment", NAME)
    await fleet.store.commit([], [Put(key=key, value=codec.encode(status))])


async def deploy(fleet: MemoryFleet, *, patience_s: float = 10.0) -> None:
    """Deploy the repository and wait, as the verb does with an open store."""
    with ProgressLine(io.StringIO()) as progress:
        clock = SystemClock()
        name = await deploy_repository(fleet.store, REPO, clock, progress)
        await wait_until_serving(fleet.store, REPO, name, clock, progress, patience_s=patience_s)


def test_a_name_with_an_organisation_is_a_hub_id() -> None:
    assert is_hub_id(REPO)
    assert not any(map(is_hub_id, ("qwen", "a/b/c", "/models/x", "./a/b", "a/")))


def test_progress_has_a_bar_while_bytes_arrive() -> None:
    fetch = FetchStatus(
        node="a",
        phase="Downloading",
        present_bytes=43 << 30,
        total_bytes=86 << 30,
        bytes_per_second=20 << 20,
        eta_seconds=109,
        source="huggingface.co",
    )
    downloading = ServingProgress(reason="Downloading", message="any words", fetch=fetch)
    assert progress_text(REPO, downloading) == (
        f"{REPO} [############------------] 50 % of 86.0 GiB from huggingface.co, 20.0 MiB/s, 1m49s left"
    )
    assert progress_text(REPO, ServingProgress(reason="Resolving", message="")) == (
        f"{REPO}: Resolving"
    )


async def test_run_deploys_nothing_that_no_gateway_could_serve() -> None:
    fleet = MemoryFleet()
    gateway = ("--gateway", f"http://127.0.0.1:{free_port()}")
    done = await run_fleetctl("run", REPO, "hi", *gateway, "--etcd", fleet.url)
    assert done.code == 1
    assert gateway[1] in done.err
    assert await read(fleet) is None


async def test_run_writes_the_deployment_and_waits_until_it_serves() -> None:
    fleet = MemoryFleet()
    async with asyncio.TaskGroup() as group:
        group.create_task(deploy(fleet))
        await set_available(fleet, "ReplicaNotReady", "qwen-0 on a: 50 % of 4.3 GiB from hub")
        await set_available(fleet, "AllReplicasReady", "", ready=1)
    deployment = await read(fleet)
    assert deployment is not None
    assert deployment.spec.model.label == f"{REPO}@main"


async def test_run_says_why_a_repository_is_not_served() -> None:
    fleet = MemoryFleet()
    why = "the hub gives it to accounts that accepted its terms"
    error, _ = await asyncio.gather(
        deploy(fleet, patience_s=0.0), set_available(fleet, "Gated", why), return_exceptions=True
    )
    assert f"is not served (Gated): {why}" in str(error)
    assert f"fleetctl delete md/{NAME}" in str(error)


async def test_run_says_that_a_wait_may_last_and_how_to_end_it() -> None:
    """A hub that is away, and Macs that are too small, may stay so."""
    fleet, shown = MemoryFleet(), io.StringIO()

    async def wait() -> None:
        with ProgressLine(shown) as progress:
            clock = SystemClock()
            name = await deploy_repository(fleet.store, REPO, clock, progress)
            await wait_until_serving(fleet.store, REPO, name, clock, progress)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(wait())
        await set_available(fleet, "SourceUnreachable", "huggingface.co cannot be reached")
        await until_async(said_to(shown, "removes it"), what="the advice")
        await set_available(fleet, "Unschedulable", "0/1 nodes fit")
        await until_async(said_to(shown, "0/1 nodes fit"), what="the next reason")
        await set_available(fleet, "AllReplicasReady", "", ready=1)
    assert shown.getvalue().count("Ctrl-C ends the wait") == 1
    assert f"`fleetctl delete md/{NAME}` removes it" in shown.getvalue()


def said_to(shown: io.StringIO, text: str) -> Callable[[], Awaitable[bool]]:
    async def said() -> bool:
        return text in shown.getvalue()

    return said


async def test_a_token_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    fleet, file = MemoryFleet(), tmp_path / "token"
    file.write_text("hf_secret")
    file.chmod(0o644)
    done = await fleet.ctl("create", "hubtoken", "hf", "--token-file", str(file))
    assert done.code == 1
    assert "hf_secret" not in done.err
