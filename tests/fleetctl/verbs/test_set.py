"""`fleetctl set`: output, exit codes and errors."""

import pytest

from store.port import Transport
from tests.support.fleetctl_manifests import DEPLOYMENT, apply_deployments, read_deployment
from tests.support.fleetctl_runner import MemoryFleet


async def test_the_model_of_deployments(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await apply_deployments(shared_fleet, "sm-1", "sm-2")
    done = await shared_fleet.ctl("set", "model", "md", "sm-1", "sm-2", "large")
    assert (done.err, done.out) == (
        "",
        "modeldeployment/sm-1 model updated\nmodeldeployment/sm-2 model updated\n",
    )
    again = await shared_fleet.ctl("set", "model", "md/sm-1", "large")
    assert again.out == "modeldeployment/sm-1 model updated (no change)\n"
    dry = await shared_fleet.ctl("set", "model", "md/sm-1", "huge", "--dry-run=server")
    assert dry.out == "modeldeployment/sm-1 model updated (server dry run)\n"
    seen = await read_deployment(shared_transport, "sm-1")
    assert (seen.spec.model.path, seen.spec.served_names, seen.metadata.generation) == (
        "large",
        ("fast",),
        2,
    )
    assert seen.metadata.managed_fields[-1].manager == "fleetctl-set"
    kept = await shared_fleet.ctl(
        "apply", "-f", "-", stdin=DEPLOYMENT.replace("NAME", "sm-1").encode()
    )
    assert "spec.model.path stays large, set by fleetctl-set; the manifest says small" in kept.err


async def test_the_adapter_and_other_fields_stay(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    whole = DEPLOYMENT.replace("NAME", "sm-lora").replace(
        "path: small", "path: small, adapter: law"
    )
    await shared_fleet.applied(whole)
    assert (await shared_fleet.ctl("set", "model", "md/sm-lora", "large")).code == 0
    seen = await read_deployment(shared_transport, "sm-lora")
    assert (seen.spec.model.path, seen.spec.model.adapter) == ("large", "law")


async def test_the_memory_of_deployments(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    await apply_deployments(shared_fleet, "sr-1")
    done = await shared_fleet.ctl("set", "resources", "md/sr-1", "--memory", "24Gi")
    assert (done.err, done.out) == ("", "modeldeployment/sr-1 resource requirements updated\n")
    seen = await read_deployment(shared_transport, "sr-1")
    assert seen.spec.resources is not None
    assert str(seen.spec.resources.memory) == "24Gi"
    assert (await shared_fleet.ctl("set", "resources", "md/sr-1", "--memory=auto")).code == 0
    assert (await read_deployment(shared_transport, "sr-1")).spec.resources is None


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("model", "md/one"), 2, "give a deployment and a folder"),
        (("model", "np/studio", "large"), 1, "nodepools have no model and no resources"),
        (("model", "md/nobody", "large"), 1, "nobody"),
        (("model", "md/se-1", ""), 1, "modeldeployment/se-1, as set: ModelDeployment/se-1: spec.model.path"),
        (("resources", "md/se-1"), 2, "--memory"),
        (("resources", "md/se-1", "--memory=24GB "), 1, "modeldeployment/se-1, as set"),
        (("image", "md/se-1", "large"), 2, "unknown command 'image'. Did you mean model?"),
    ],
)  # fmt: skip
async def test_what_cannot_be_set(
    shared_fleet: MemoryFleet, words: tuple[str, ...], code: int, text: str
) -> None:
    await apply_deployments(shared_fleet, "se-1")
    done = await shared_fleet.ctl("set", *words)
    assert (done.code, text in done.err) == (code, True), done.err
