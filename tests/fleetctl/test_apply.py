"""`fleetctl apply` and `diff` beside other writers: what stays, what is refused, what is pruned."""

import json
from pathlib import Path

import pytest

from store import keys
from store.port import Put, Transport
from tests.support.fleet import Done, Fleet, fleetctl

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]

NOTHING_THERE = "http://127.0.0.1:1"


def deployment(name: str, *, replicas: int = 2, labels: str = "team: a") -> str:
    return (
        "---\napiVersion: fleet/v1alpha1\nkind: ModelDeployment\n"
        f"metadata: {{name: {name}, labels: {{{labels}}}}}\n"
        f"spec:\n  model: {{path: qwen}}\n  replicas: {replicas}\n"
    )


def pool(name: str) -> str:
    return (
        "---\napiVersion: fleet/v1alpha1\nkind: NodePool\n"
        f"metadata: {{name: {name}}}\nspec: {{nodes: [mac-1]}}\n"
    )


async def said(store: Fleet, verb: str, text: str, *flags: str) -> Done:
    return await store.ctl(verb, "-f", "-", *flags, stdin=text.encode())


async def scaled(store: Fleet, name: str, count: int) -> None:
    """Change the number of replicas as another writer does."""
    done = await store.ctl("scale", f"md/{name}", f"--replicas={count}")
    assert done.code == 0, done.err


async def replicas(store: Fleet, name: str) -> int:
    done = await store.ctl("get", f"md/{name}", "-o", "json")
    found: int = json.loads(done.out)["spec"]["replicas"]
    return found


async def test_what_others_changed_stays_and_is_said(shared: Fleet) -> None:
    await shared.applied(deployment("kept"))
    await scaled(shared, "kept", 5)
    again = await said(shared, "apply", deployment("kept"))
    assert (again.code, again.out) == (0, "modeldeployment/kept unchanged\n")
    assert again.err == (
        "warning: modeldeployment/kept: spec.replicas stays 5, set by fleetctl-scale; the manifest says 2. "
        "--force-conflicts puts it back\n"
    )
    differs = await said(shared, "diff", deployment("kept"))
    assert (differs.code, differs.out, differs.err) == (0, "", again.err)
    assert await replicas(shared, "kept") == 5
    forced = await said(shared, "apply", deployment("kept"), "--force-conflicts")
    assert (forced.out, forced.err) == ("modeldeployment/kept configured\n", "")
    assert await replicas(shared, "kept") == 2


async def test_a_conflict_is_shown_with_its_owner_and_nothing_is_written(shared: Fleet) -> None:
    await shared.applied(deployment("torn"))
    await scaled(shared, "torn", 5)
    text = pool("never") + deployment("torn", replicas=3)
    refused = await said(shared, "apply", text)
    told = (
        "standard input:12:13: ModelDeployment/torn: spec.replicas: is 5, set by fleetctl-scale; the manifest says "
        "3. To use the manifest's value, give --force-conflicts; to keep the current one, remove the field from the manifest\n"
    )
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == f"error: nothing was written:\n{told}"
    assert (await shared.ctl("get", "np/never")).code == 1
    differs = await said(shared, "diff", text)
    assert (differs.code, differs.err) == (2, f"error: {told}")
    forced = await said(shared, "diff", text, "--force-conflicts")
    assert forced.code == 1
    assert "-  replicas: 5\n+  replicas: 3\n" in forced.out


async def test_a_label_of_a_person_stays(shared: Fleet) -> None:
    await shared.applied(deployment("named"))
    done = await shared.ctl("label", "md/named", "owner=kim")
    assert done.code == 0, done.err
    again = await said(shared, "apply", deployment("named", labels="team: b"))
    assert (again.out, again.err) == ("modeldeployment/named configured\n", "")
    tree = json.loads((await shared.ctl("get", "md/named", "-o", "json")).out)
    assert tree["metadata"]["labels"] == {"owner": "kim", "team": "b"}


async def test_another_manager_is_asked(shared: Fleet) -> None:
    await shared.applied(deployment("two"))
    flag = "--field-manager=ci"
    same = await said(shared, "apply", deployment("two"), flag)
    assert same.out == "modeldeployment/two configured\n"
    other = await said(shared, "apply", deployment("two", replicas=4), flag)
    assert other.code == 1
    assert "spec.replicas: is 2, set by fleetctl; the manifest says 4" in other.err


async def test_pruning_deletes_what_was_taken_out(shared: Fleet) -> None:
    flags = ("--applyset=lab", "--prune")
    first = await said(shared, "apply", pool("lab-a") + pool("lab-b"), *flags)
    assert first.out == "nodepool/lab-a created\nnodepool/lab-b created\n", first.err
    differs = await said(shared, "diff", pool("lab-b"), *flags)
    assert differs.code == 1
    assert differs.out.startswith("--- NodePool/lab-a (now)\n+++ /dev/null\n@@ -1,")
    dry = await said(shared, "apply", pool("lab-b"), *flags, "--dry-run=server")
    assert dry.out == (
        "nodepool/lab-b unchanged (server dry run)\nnodepool/lab-a pruned (server dry run)\n"
    )
    only = await said(shared, "apply", pool("lab-b"), *flags, "--prune-allowlist=md")
    assert only.out == "nodepool/lab-b unchanged\n"
    done = await said(shared, "apply", pool("lab-b"), *flags)
    assert done.out == "nodepool/lab-b unchanged\nnodepool/lab-a pruned\n"
    assert (await shared.ctl("get", "np/lab-a")).code == 1


async def test_two_sets_cannot_have_one_object(shared: Fleet) -> None:
    await said(shared, "apply", pool("one"), "--applyset=mine")
    refused = await said(shared, "apply", pool("one"), "--applyset=yours")
    assert refused.code == 1
    assert "belongs to the apply set mine; the apply set yours cannot have it too" in refused.err


async def test_what_cannot_be_pruned_is_said_and_kept(shared: Fleet) -> None:
    flags = ("--applyset=used", "--prune")
    await said(shared, "apply", pool("used-a"), *flags)
    await shared.applied(deployment("user") + "  placement: {pools: [used-a]}\n")
    done = await said(shared, "apply", pool("used-b"), *flags)
    assert (done.code, done.out) == (1, "nodepool/used-b created\n")
    assert done.err == (
        "error: all objects were written; pruning failed: NodePool/used-a is used by ModelDeployment/user. "
        "Change or delete it first. Not pruned: NodePool/used-a. Applying again is safe, and tries again\n"
    )


async def test_output_forms(shared: Fleet) -> None:
    named = await said(shared, "apply", pool("form"), "-o", "name")
    assert named.out == "nodepool/form\n"
    tree = json.loads((await said(shared, "apply", pool("form"), "-o", "json")).out)
    assert tree["metadata"]["generation"] == 1
    assert "managedFields" not in tree["metadata"]


async def test_only_some_of_the_manifests(shared: Fleet) -> None:
    text = deployment("some-a", labels="x: y") + deployment("some-b")
    done = await said(shared, "apply", text, "-l", "x=y")
    assert done.out == "modeldeployment/some-a created\n"
    none = await said(shared, "apply", text, "-l", "x=z")
    assert (none.code, none.err) == (1, "error: no manifest has the labels x=z\n")


async def test_a_client_dry_run_needs_no_store(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(pool("dry"))
    words = ("apply", "-f", str(file), "--dry-run=client", "--etcd", NOTHING_THERE)
    done = await fleetctl(*words)
    assert (done.code, done.out) == (0, "nodepool/dry valid (dry run)\n")
    shown = await fleetctl(*words, "-o", "yaml")
    assert shown.out == (
        "apiVersion: fleet/v1alpha1\nkind: NodePool\nmetadata:\n  name: dry\nspec:\n  nodes:\n  - mac-1\n"
    )
    file.write_text(pool("dry").replace("nodes", "nodse"))
    wrong = await fleetctl(*words)
    assert wrong.code == 1
    assert f"{file}:5:8: NodePool/dry: spec.nodse: unknown field" in wrong.err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--prune",), "--prune needs --applyset NAME"),
        (("--prune", "--applyset=a", "-l", "x=y"), "--prune does not go with -l"),
        (
            ("--prune", "--applyset=a", "--dry-run=client"),
            "is known to the store alone; write --dry-run=server",
        ),
        (("--dry-run",), "it needs a value; write --dry-run=client or --dry-run=server"),
        (
            ("--dry-run", "true"),
            "'true' is not one of 'none', 'client', 'server'; write --dry-run=client or --dry-run=server",
        ),
        (("--prune-allowlist=md",), "says what --prune may delete; give both"),
        (("--prune", "--applyset=a", "--prune-allowlist=rep"), "no manifest declares replicas"),
        (("--applyset=A/b",), "--applyset: 'A/b' is no name"),
        (("--field-manager=gitsource/x",), "is the reconciler's, for a GitSource"),
        (("--field-manager=",), "expected a name of 1 to 128 printable characters"),
    ],
)
async def test_flags_that_do_not_go_together(flags: tuple[str, ...], told: str) -> None:
    done = await fleetctl("apply", "-f", "-", *flags, stdin=pool("a").encode())
    assert done.code == 2
    assert told in " ".join(done.err.split())


async def test_colours_only_where_they_are_asked_for(
    shared: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await said(shared, "diff", pool("colour"))
    assert "\x1b" not in plain.out
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = await said(shared, "diff", pool("colour"))
    assert "\x1b[32m+kind: NodePool\n\x1b[0m" in shown.out


async def test_a_damaged_inventory_is_refused_with_words(
    shared: Fleet, transport: Transport
) -> None:
    await transport.commit([], [Put(key=keys.named(keys.APPLY_SET_PREFIX, "bad"), value=b"{}")])
    done = await said(shared, "apply", pool("x"), "--applyset=bad")
    assert done.code == 1
    assert "/mlx-fleet/v1/applyset/bad: name: Field required" in done.err
