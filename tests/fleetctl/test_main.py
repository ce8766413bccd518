"""The verbs together: output and exit codes as in kubectl."""

import asyncio
import json
import sys
from pathlib import Path

import click
import pytest

from fleetctl.__main__ import main
from manifests.load import load_objects
from tests.support.fleet import Fleet
from tests.support.fleetctl_runner import CommandFleet, MemoryFleet

MANIFEST = """
apiVersion: fleet/v1alpha1
kind: NodePool
metadata: {name: studio, labels: {site: berlin}}
spec: {nodes: [mac-1]}
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: qwen, labels: {team: a}}
spec:
  model: {path: qwen}
  servedNames: [standard]
  replicas: 2
  placement: {pools: [studio]}
"""


@pytest.mark.etcd
@pytest.mark.timeout(120)
async def test_apply_get_diff_delete(fleet: MemoryFleet, tmp_path: Path) -> None:
    done = await fleet.ctl("apply", "-f", "-", stdin=MANIFEST.encode())
    assert done.out.splitlines() == ["nodepool/studio created", "modeldeployment/qwen created"]
    again = await fleet.ctl("apply", "-f", "-", stdin=MANIFEST.encode())
    assert again.out.splitlines() == ["nodepool/studio unchanged", "modeldeployment/qwen unchanged"]

    table = await fleet.ctl("get", "md")
    assert table.out.splitlines()[0].split() == ["NAME", "READY", "AVAILABLE", "AGE"]
    assert table.out.splitlines()[1].split()[:3] == ["qwen", "0/2", "Unknown"]
    wide = await fleet.ctl("get", "modeldeployments", "-o", "wide")
    assert "qwen,standard" in wide.out
    named = await fleet.ctl("get", "ModelDeployment", "-o", "name")
    assert named.out == "modeldeployment/qwen\n"
    tree = json.loads((await fleet.ctl("get", "md/qwen", "-o", "json")).out)
    assert tree["spec"]["servedNames"] == ["standard"]
    assert tree["metadata"]["generation"] == 1

    await selects(fleet)
    await diffs(fleet, tmp_path)

    in_use = await fleet.ctl("delete", "nodepool/studio")
    assert in_use.code == 1
    assert "ModelDeployment/qwen" in in_use.err
    missing = await fleet.ctl("delete", "md/qwem")
    assert missing.code == 1
    assert "qwen" in missing.err
    ignored = await fleet.ctl("delete", "md/qwem", "--ignore-not-found")
    assert (ignored.code, ignored.out) == (0, "")


async def selects(fleet: CommandFleet) -> None:
    assert (await fleet.ctl("get", "md", "-l", "team=a", "-o", "name")).out
    nothing = await fleet.ctl("get", "md", "-l", "team=b")
    assert (nothing.code, nothing.out, nothing.err) == (0, "", "no modeldeployments found\n")
    both = await fleet.ctl("get", "md", "qwen", "-l", "team=a")
    assert both.code == 2
    wrong = await fleet.ctl("get", "md", "-l", "team a")
    assert wrong.code == 1
    assert "key=value" in wrong.err
    missing = await fleet.ctl("get", "md", "qwem")
    assert missing.code == 1
    assert missing.err == 'error: modeldeployments "qwem" not found; did you mean qwen?\n'


async def diffs(fleet: CommandFleet, tmp_path: Path) -> None:
    """The output of `get -o yaml` can be applied again, and is no difference."""
    same = await fleet.ctl("diff", "-f", "-", stdin=MANIFEST.encode())
    assert (same.code, same.out) == (0, "")
    other = await fleet.ctl("diff", "-f", "-", stdin=MANIFEST.replace("2", "3").encode())
    assert other.code == 1
    assert "-  replicas: 2" in other.out
    assert "+  replicas: 3" in other.out
    broken = await fleet.ctl("diff", "-f", "-", stdin=b"{")
    assert broken.code == 2
    printed = tmp_path / "qwen.yaml"
    printed.write_text((await fleet.ctl("get", "md/qwen", "-o", "yaml")).out)
    assert len(load_objects([str(printed)])) == 1
    back = await fleet.ctl("apply", "-f", str(printed))
    assert back.out == "modeldeployment/qwen unchanged\n", back.err
    assert (await fleet.ctl("diff", "-f", "-", stdin=MANIFEST.encode())).code == 0


@pytest.mark.etcd
@pytest.mark.timeout(120)
async def test_describe_and_wait_show_reasons(store: Fleet) -> None:
    store.start_reconciler()
    await store.applied(MANIFEST)
    waited = await store.ctl("wait", "md/qwen", "--for=condition=Placed=false", "--timeout=20s")
    assert (waited.code, waited.out) == (0, "modeldeployment/qwen condition met\n")
    late = await store.ctl("wait", "md/qwen", "--for=condition=Available", "--timeout=200ms")
    assert late.code == 1
    assert "no node has joined the fleet yet" in late.err
    described = await store.ctl("describe", "md", "qwen")
    for word in ("Name:", "team=a", "Unschedulable", "Events:", "no node has joined"):
        assert word in described.out
    # Asked for by a reconciler that is there: a deployment without replicas goes at once.
    deleted = await store.ctl("delete", "md/qwen")
    assert (deleted.code, deleted.out) == (0, "modeldeployment/qwen deleted\n")
    gone = await store.ctl("wait", "md/qwen", "--for=delete")
    assert gone.code == 0


@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_version(store: Fleet) -> None:
    client = await store.ctl("version", "--client")
    assert client.out == "fleetctl: 0.1.0\n"
    both = await store.ctl("version")
    assert "etcd: 3." in both.out


@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_a_watch_prints_each_change_once(store: Fleet) -> None:
    await store.applied(MANIFEST)
    words = ("get", "md", "-w", "--etcd", str(store.etcd.address))
    watching = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", *words), stdout=asyncio.subprocess.PIPE
    )
    assert watching.stdout is not None
    try:
        async with asyncio.timeout(30):
            assert (await watching.stdout.readline()).split()[:2] == [b"NAME", b"READY"]
            assert (await watching.stdout.readline()).split()[:2] == [b"qwen", b"0/2"]
            await store.applied(MANIFEST.replace("name: studio", "name: other").split("---")[0])
            await store.applied(MANIFEST.replace("replicas: 2", "replicas: 3"))
            assert (await watching.stdout.readline()).split()[:2] == [b"qwen", b"0/3"]
    finally:
        watching.terminate()
        await watching.wait()


# The lower rooms import nothing of fleetctl (import-linter), so the forks may share them: that takes a quarter of the time.
_EACH_ALONE = """
import importlib, os, pkgutil, sys
import aiohttp, asyncio, grpc, pydantic
for room in ("machinery", "models", "schemas", "store"):
    for found in pkgutil.walk_packages(importlib.import_module(room).__path__, f"{room}."):
        if not found.name.endswith(".__main__"):
            importlib.import_module(found.name)
from fleetctl.__main__ import main
for verb in sys.argv[1:]:
    if os.fork() == 0:
        main([verb, "--help"], prog_name="fleetctl")
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, verb
"""


@pytest.mark.ci
@pytest.mark.timeout(300)
async def test_every_verb_imports_what_it_needs() -> None:
    """Other tests run forks of a process that has imported the modules of all verbs."""
    verbs = main.list_commands(click.Context(main))
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _EACH_ALONE, *verbs),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await child.communicate()
    assert (child.returncode, err) == (0, b"")
    for verb in verbs:
        assert f"Usage: fleetctl {verb}".encode() in out


SMOKE = [
    (("apply", "-f", "-"), 0, "nodepool/studio created"),
    (("create", "np", "made", "--node=mac-1"), 0, "nodepool/made created"),
    (("label", "md/qwen", "team=b", "--overwrite"), 0, "modeldeployment/qwen labeled"),
    (("annotate", "md/qwen", "owner=anna"), 0, "modeldeployment/qwen annotated"),
    (("patch", "md/qwen", "-p", "spec: {concurrency: 8}"), 0, "modeldeployment/qwen patched"),
    (("scale", "md/qwen", "--replicas=1"), 0, "modeldeployment/qwen scaled"),
    (("describe", "md/qwen"), 0, "Name:"),
    (("explain", "placement", "qwen"), 0, "modeldeployment/qwen: 0 of 1 replicas are placed"),
    (("plan", "-f", "-"), 0, "Placement"),
    (("wait", "md/qwen", "--for=create"), 0, "modeldeployment/qwen created"),
    (("rollout", "pause", "qwen"), 0, "modeldeployment/qwen paused"),
    (("cordon", "mac-1"), 1, ""),
    (("uncordon", "mac-1"), 1, ""),
    (("taint", "mac-1", "a=b:NoSchedule"), 1, ""),
    (("drain", "mac-1"), 1, ""),
    (("routes",), 1, ""),
    (("cancel", "an-id"), 1, ""),
    (("suspend", "none"), 1, ""),
    (("delete", "np,md", "--all", "--no-wait"), 0, "modeldeployment/qwen "),
]


@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_each_verb_as_a_process_on_a_real_etcd(store: Fleet) -> None:
    """The other tests of verbs run them in this process, over a store in memory."""
    for words, code, start in SMOKE:
        done = await store.ctl(*words, stdin=MANIFEST.encode())
        assert (done.code, done.out[: len(start)]) == (code, start), (words, done)
