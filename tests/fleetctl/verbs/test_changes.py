"""changes: who changed what and why, for verbs that write in different ways."""

import json

from store.port import Transport
from tests.support.fleetctl_runner import MemoryFleet


async def test_every_kind_of_write_is_recorded_with_its_reason(fleet: MemoryFleet) -> None:
    manifest = (
        "apiVersion: fleet/v1alpha1\nkind: ModelDeployment\nmetadata: {name: qwen}\n"
        "spec: {model: {path: qwen}, replicas: 1}\n"
    )
    for words, stdin in (
        (("apply", "-f", "-", "--reason", "first try"), manifest.encode()),
        (("scale", "--replicas=3", "md/qwen", "--reason", "a busy evening"), b""),
        (("label", "md/qwen", "team=lab"), b""),
        (("create", "apikey", "laptop", "--reason", "a new colleague"), b""),
        (("delete", "md/qwen", "--no-wait", "--reason", "moved"), b""),
    ):
        done = await fleet.ctl(*words, stdin=stdin)
        assert done.code == 0, done.err
    found = json.loads((await fleet.ctl("changes", "-o", "json")).out)["items"]
    told = [(one["command"], one["reason"], one["objects"][0]["verb"]) for one in found]
    assert told == [
        ("fleetctl apply", "first try", "create"),
        ("fleetctl scale", "a busy evening", "update"),
        ("fleetctl label", "", "update"),
        ("fleetctl create apikey", "a new colleague", "create"),
        ("fleetctl delete", "moved", "delete"),
    ]
    scaled = found[1]["objects"][0]
    assert scaled["fields"] == [{"path": "spec.replicas", "old": "1", "new": "3"}]
    assert found[0]["revision"] == scaled["fromRevision"] < found[1]["revision"]
    assert "sk-fleet-" not in json.dumps(found)

    wide = (await fleet.ctl("changes", "--for", "md/qwen", "-o", "wide")).out.splitlines()
    assert wide[0].split() == [
        "TIME",
        "USER",
        "ACCOUNT",
        "COMMAND",
        "FROM",
        "TO",
        "CHANGE",
        "REASON",
    ]
    assert len(wide) == 5
    assert "update modeldeployment/qwen: spec.replicas 1 -> 3" in wide[2]
    none = await fleet.ctl("changes", "--user", "nobody-else")
    assert (none.code, none.err) == (0, "no changes found\n")


async def test_a_dry_run_and_a_refused_reason_record_nothing(
    fleet: MemoryFleet, transport: Transport
) -> None:
    refused = await fleet.ctl("scale", "--replicas=3", "md/qwen", "--reason", "two\nlines")
    assert (refused.code, "one line of at most 500" in refused.err) == (2, True)
    assert json.loads((await fleet.ctl("changes", "-o", "json")).out)["items"] == []


async def test_many_objects_of_one_change_are_counted(fleet: MemoryFleet) -> None:
    manifest = "---\n".join(
        f"apiVersion: fleet/v1alpha1\nkind: NodePool\nmetadata: {{name: p{number}}}\nspec: {{nodes: [a]}}\n"
        for number in range(4)
    )
    done = await fleet.ctl("apply", "-f", "-", stdin=manifest.encode())
    assert done.code == 0, done.err
    shown = (await fleet.ctl("changes", "--no-headers")).out
    assert "create nodepool/p2; and 1 more object " in shown
