"""`fleetctl taint`: arguments, the resulting taints, output and errors."""

import click
import pytest

from fleetctl.verbs import taint
from insight import edits
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeSpec, Taint
from store.errors import EditRefusedError
from store.port import Transport
from tests.support.fleetctl_manifests import join_node, read_node
from tests.support.fleetctl_runner import MemoryFleet

ANNA = Taint(key="owner", value="anna", effect="NoSchedule")
SLOW = Taint(key="slow", effect="PreferNoSchedule")
GONE = Taint(key="slow", effect="NoExecute")
NODE = Node(metadata=ObjectMeta(name="mac-1"), spec=NodeSpec(taints=(ANNA, SLOW)))


def test_parse_changes() -> None:
    words = ["owner=anna:NoSchedule", "slow:PreferNoSchedule", "a:NoExecute-", "b-"]
    assert taint.parse_changes(words) == ([ANNA, SLOW], [("a", "NoExecute"), ("b", "")])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a=b:NoShedule"], "'NoShedule' is not an effect. The effects are NoSchedule (no new replicas), Prefer"),
        (["a:noschedule"], "'noschedule' is not an effect. Did you mean NoSchedule? The effects are"),
        (["a:no-execute-"], "Did you mean NoExecute?"),
        (["a:"], "'' is not an effect"),
        (["a=b"], "'a=b' has no effect; write KEY=VALUE:EFFECT or KEY:EFFECT"),
        ([":NoSchedule"], "'' is not a valid key of a taint"),
        (["a=b c:NoSchedule"], "'b c' is not a valid value of a taint"),
        (["a=b:NoSchedule", "a=c:NoSchedule"], "a:NoSchedule is given twice"),
        (["a:NoSchedule", "a-"], "a:NoSchedule cannot be added and removed at once"),
    ],
)  # fmt: skip
def test_invalid_taints_are_errors(words: list[str], expected: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        taint.parse_changes(words)
    assert expected in caught.value.message


@pytest.mark.parametrize(
    ("words", "overwrite", "after"),
    [
        (["slow:NoExecute"], False, (ANNA, SLOW, GONE)),
        (["owner=ben:NoSchedule"], True, (ANNA.model_copy(update={"value": "ben"}), SLOW)),
        (["slow-"], False, (ANNA,)),
        (["slow:PreferNoSchedule-", "owner-"], False, ()),
    ],
)
def test_updated_taints(words: list[str], overwrite: bool, after: tuple[Taint, ...]) -> None:
    changed = edits.with_taints(NODE, *taint.parse_changes(words), overwrite=overwrite)
    assert changed is not None
    assert changed.spec.taints == after


@pytest.mark.parametrize("words", [["slow:NoExecute-"], ["nobody-"], ["slow=x:PreferNoSchedule"]])
def test_impossible_changes_are_errors(words: list[str]) -> None:
    with pytest.raises(EditRefusedError):
        edits.with_taints(NODE, *taint.parse_changes(words))


async def test_taint(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await join_node(shared_transport, "tin-1", "tin-2")
    done = await shared_fleet.ctl(
        "taint", "tin-1", "owner=anna:NoSchedule", "slow:PreferNoSchedule"
    )
    assert (done.code, done.out) == (0, "node/tin-1 tainted\n")
    twice = await shared_fleet.ctl("taint", "nodes", "tin-1", "owner=ben:NoSchedule")
    assert (twice.code, twice.out) == (1, "")
    assert twice.err == (
        "error: node/tin-1 already has owner=anna:NoSchedule; change the value with --overwrite\n"
    )
    other = await shared_fleet.ctl("taint", "tin-1", "owner=ben:NoSchedule", "--overwrite")
    assert other.out == "node/tin-1 tainted\n"
    both = await shared_fleet.ctl("taint", "tin-1", "new:NoExecute", "slow-")
    assert both.out == "node/tin-1 modified\n"
    seen = await read_node(shared_transport, "tin-1")
    assert [(t.key, t.value, t.effect) for t in seen.spec.taints] == [
        ("owner", "ben", "NoSchedule"),
        ("new", "", "NoExecute"),
    ]
    assert seen.metadata.generation == 4
    missing = await shared_fleet.ctl("taint", "tin-1", "slow-")
    assert missing.code == 1
    assert missing.err == (
        'error: taint "slow" not found on node/tin-1, which has owner=ben:NoSchedule, new:NoExecute\n'
    )
    # If one of several changes is invalid, none is written.
    part = await shared_fleet.ctl("taint", "tin-2", "tin-1", "new:NoExecute")
    assert (part.code, part.out) == (1, "")
    assert (await read_node(shared_transport, "tin-2")).spec.taints == ()
    gone = await shared_fleet.ctl("taint", "tin-1", "owner:NoSchedule-", "new=x:NoExecute-")
    assert gone.out == "node/tin-1 untainted\n"


MISUSED = [
    (("taint", "mac-1"), 2, "which taint? Give KEY=VALUE:EFFECT"),
    (("taint", "a:NoSchedule"), 2, "which nodes? Give their names, or -l or --all"),
    (("taint", "mac-9", "a:NoSchedule"), 1, 'nodes "mac-9" not found'),
]


@pytest.mark.parametrize(("words", "code", "expected"), MISUSED, ids=lambda v: str(v)[:40])
async def test_errors_have_hints(
    shared_fleet: MemoryFleet,
    shared_transport: Transport,
    words: tuple[str, ...],
    code: int,
    expected: str,
) -> None:
    await join_node(shared_transport, "mac-1")
    done = await shared_fleet.ctl(*words)
    assert done.code == code, done.err
    assert expected in done.err
    assert done.out == ""
