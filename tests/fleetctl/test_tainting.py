"""What `fleetctl taint` takes, and what becomes of taints."""

import click
import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.verbs import taint
from fleetctl.verbs.taint import TaintRemoval
from schemas.node import Taint

ANNA = Taint(key="owner", value="anna", effect="NoSchedule")
SLOW = Taint(key="slow", effect="PreferNoSchedule")
GONE = Taint(key="slow", effect="NoExecute")


def test_words_become_taints_and_removals() -> None:
    wish = taint.parse_changes(
        ["owner=anna:NoSchedule", "slow:PreferNoSchedule", "a:NoExecute-", "b-"]
    )
    assert wish.added == (ANNA, SLOW)
    assert wish.removed == (TaintRemoval(key="a", effect="NoExecute"), TaintRemoval(key="b"))
    assert wish.done == "modified"
    assert taint.parse_changes(["b-"]).done == "untainted"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a=b:NoShedule"], "'NoShedule' is no effect. There are NoSchedule (nothing new comes), Prefer"),
        (["a:noschedule"], "'noschedule' is no effect. Did you mean NoSchedule? There are"),
        (["a:no-execute-"], "Did you mean NoExecute?"),
        (["a:"], "'' is no effect"),
        (["a=b"], "'a=b' has no effect; write KEY=VALUE:EFFECT or KEY:EFFECT"),
        ([":NoSchedule"], "'' is no key of a taint"),
        (["a=b c:NoSchedule"], "'b c' is no value of a taint"),
        (["a=b:NoSchedule", "a=c:NoSchedule"], "a:NoSchedule is there twice"),
        (["a:NoSchedule", "a-"], "a:NoSchedule cannot be added and taken away at once"),
    ],
)  # fmt: skip
def test_what_is_no_taint_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        taint.parse_changes(words)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("words", "overwrite", "after"),
    [
        (["slow:NoExecute"], False, (ANNA, SLOW, GONE)),
        (["owner=ben:NoSchedule"], True, (ANNA.model_copy(update={"value": "ben"}), SLOW)),
        (["slow-"], False, (ANNA,)),
        (["slow:PreferNoSchedule-", "owner-"], False, ()),
    ],
)
def test_taints_of_a_node(words: list[str], overwrite: bool, after: tuple[Taint, ...]) -> None:
    wish = taint.parse_changes(words)
    assert taint.updated_taints("mac-1", (ANNA, SLOW), wish, overwrite=overwrite) == after


@pytest.mark.parametrize("words", [["slow:NoExecute-"], ["nobody-"], ["slow=x:PreferNoSchedule"]])
def test_what_cannot_be_is_refused(words: list[str]) -> None:
    with pytest.raises(FleetctlError):
        taint.updated_taints("mac-1", (ANNA, SLOW), taint.parse_changes(words), overwrite=False)
