"""The verbs together: output and exit codes as in kubectl."""

import asyncio
import subprocess
import sys
from pathlib import Path

import click
import pytest

from fleetctl.__main__ import main
from tests.support.fleet import Fleet

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


@pytest.mark.ci
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


@pytest.mark.parametrize(
    ("words", "line"),
    [
        pytest.param(("get", "--help"), "Usage: {} get [OPTIONS]", id="help"),
        pytest.param(("help", "config", "view"), "Usage: {} config view [OPTIONS]", id="help-verb"),
        pytest.param(("get", "-h"), "    {} get nodes\n", id="example"),
        pytest.param(("completion", "-h"), "{0} completion fish > ~/.config/fish/completions/{0}.fish", id="file"),
        pytest.param(("gte",), "Try '{} --help' for help.", id="usage-error"),
        pytest.param(("get", "nodes", "--context", "x"), "`{} config set-context x --etcd URL`", id="advice"),
    ],
)  # fmt: skip
def test_help_and_errors_name_the_program_that_was_called(
    words: tuple[str, ...], line: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("mlx-fleet"), *words],
        capture_output=True,
        text=True,
        timeout=60.0,
        env={"HOME": str(tmp_path)},
        check=False,
    )
    assert line.format("mlx-fleet") in done.stdout + done.stderr


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
