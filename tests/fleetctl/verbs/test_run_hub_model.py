"""fleetctl run ORGANISATION/NAME, create hubtoken, create --hub, rollout refresh, and a hub id in the wrong place."""

import asyncio
import io
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fleetctl.cli.terminal import ProgressLine
from fleetctl.verbs.run_hub_model import (
    ServingProgress,
    deploy_repository,
    is_hub_id,
    progress_text,
    wait_until_serving,
)
from machinery.clock import SystemClock
from schemas.deployment import HubReference, ModelDeployment, ModelDeploymentStatus
from schemas.meta import HUB_REFRESHED_AT, Condition, ConditionStatus
from schemas.records import HubToken
from schemas.replica import FetchStatus, ReplicaStatus
from store import codec, keys, objects
from store.port import Put
from tests.support.fleetctl_runner import MemoryFleet, run_fleetctl
from tests.support.nodeagent_plans import wanted
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


async def test_get_and_describe_show_the_progress_of_a_fetch() -> None:
    fleet = MemoryFleet()
    fetch = FetchStatus(
        node="a",
        phase="Downloading",
        present_bytes=1 << 30,
        total_bytes=4 << 30,
        bytes_per_second=16 << 20,
        eta_seconds=192,
        source="huggingface.co",
    )
    replica = wanted()
    puts = [
        Put(key=keys.spec_key("Replica", replica.name), value=codec.encode(replica)),
        Put(
            key=keys.status_key("Replica", replica.name),
            value=codec.encode(ReplicaStatus(fetches=(fetch,))),
        ),
    ]
    await fleet.store.commit([], puts)
    table = await fleet.ctl("get", "replicas", "-o", "wide")
    assert "FETCH" in table.out
    assert "25 % of 4.0 GiB" in table.out
    assert "huggingface.co" in table.out
    field = await fleet.ctl(
        "get", "replicas", "-o", "jsonpath={.items[0].status.fetches[0].etaSeconds}"
    )
    assert field.out == "192"
    described = await fleet.ctl("describe", "replica", replica.name)
    (row,) = [line for line in described.out.splitlines() if "16.0 MiB/s" in line]
    assert row.split()[:5] == [replica.name, "a", "Downloading", "25", "%"]
    assert "3m12s" in row


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


async def test_create_writes_a_hub_model_and_refuses_two_sources() -> None:
    fleet = MemoryFleet()
    scope = await fleet.ctl("create", "md", "scope", "--hub", REPO, "--source", "modelscope")
    assert scope.code == 0, scope.err
    made = await read(fleet, "scope")
    assert made is not None
    assert made.spec.model.hub == HubReference(repo=REPO, source="modelscope", revision="master")
    done = await fleet.ctl("create", "md", "qwen", "--hub", REPO, "--revision", "dev")
    assert done.code == 0, done.err
    deployment = await read(fleet, "qwen")
    assert deployment is not None
    hub = deployment.spec.model.hub
    assert hub is not None
    assert (hub.repo, hub.revision, deployment.spec.model.path) == (REPO, "dev", None)
    both = await fleet.ctl("create", "md", "other", "--hub", REPO, "--model", "x")
    assert "give either --hub ORG/NAME or --model FOLDER" in both.err


async def test_a_hub_id_as_a_path_is_refused_with_the_right_field(tmp_path: Path) -> None:
    fleet = MemoryFleet()
    manifest = tmp_path / "a.yaml"
    head = "apiVersion: fleet/v1alpha1\nkind: ModelDeployment\nmetadata: {name: a}\n"
    manifest.write_text(f"{head}spec:\n  model:\n    path: {REPO}\n")
    done = await fleet.ctl("apply", "-f", str(manifest))
    assert done.code == 1
    assert f"{REPO} looks like a repository of a model hub" in done.err
    assert f"hub: {{repo: {REPO}}}" in done.err
    manifest.write_text(f"{head}spec:\n  model:\n    path: ./{REPO}\n")
    assert (await fleet.ctl("apply", "-f", str(manifest))).code == 0


async def test_refresh_marks_a_branch_and_refuses_what_cannot_move() -> None:
    fleet = MemoryFleet()
    await fleet.ctl("create", "md", "branch", "--hub", REPO)
    await fleet.ctl("create", "md", "commit", "--hub", REPO, "--revision", "ab" * 20)
    await fleet.ctl("create", "md", "folder", "--model", "x")
    done = await fleet.ctl("rollout", "refresh", "branch")
    assert (done.code, done.out) == (0, "modeldeployment/branch refreshed\n")
    deployment = await read(fleet, "branch")
    assert deployment is not None
    assert deployment.metadata.annotations[HUB_REFRESHED_AT]
    assert deployment.metadata.generation == 2
    assert "a commit, which never moves" in (await fleet.ctl("rollout", "refresh", "commit")).err
    assert "a model in a folder" in (await fleet.ctl("rollout", "refresh", "folder")).err


async def test_a_hub_token_is_read_from_standard_input_and_never_shown() -> None:
    fleet = MemoryFleet()
    words = ("create", "hubtoken", "hf", "--endpoint", "https://mirror.example")
    done = await fleet.ctl(*words, "--token-file", "-", stdin=b"hf_secret\n")
    assert done.code == 0, done.err
    assert "hf_secret" not in done.out + done.err
    item = await fleet.store.get(keys.named(keys.HUB_TOKEN_PREFIX, "hf"))
    assert item is not None
    stored = codec.decode(HubToken, item)
    assert (stored.endpoint, stored.token.get_secret_value()) == (
        "https://mirror.example",
        "hf_secret",
    )
    assert "hf_secret" not in repr(stored)
    gone = await fleet.ctl("create", "hubtoken", "hf", "--remove")
    assert (gone.code, gone.out) == (0, "hubtoken/hf deleted\n")
    assert (
        "there is no hubtoken hf" in (await fleet.ctl("create", "hubtoken", "hf", "--remove")).err
    )


@pytest.mark.parametrize("text", [b"", b"two words", b"\xff\xfe", b"x" * 501])
async def test_what_is_no_token_is_refused_without_quoting_it(text: bytes) -> None:
    fleet = MemoryFleet()
    done = await fleet.ctl("create", "hubtoken", "hf", "--token-file", "-", stdin=text)
    assert done.code == 1
    assert "standard input holds no token" in done.err
    assert "two words" not in done.err


async def test_a_token_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    fleet, file = MemoryFleet(), tmp_path / "token"
    file.write_text("hf_secret")
    file.chmod(0o644)
    done = await fleet.ctl("create", "hubtoken", "hf", "--token-file", str(file))
    assert done.code == 1
    assert "hf_secret" not in done.err
