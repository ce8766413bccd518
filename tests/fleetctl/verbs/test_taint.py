"""Arguments of `fleetctl taint`, and the resulting taints. Pure."""

import click
import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.verbs import taint
from fleetctl.verbs.taint import TaintRemoval
from schemas.node import Taint

ANNA = Taint(key="owner", value="anna", effect="NoSchedule")
SLOW = Taint(key="slow", effect="PreferNoSchedule")
GONE = Taint(key="slow", effect="NoExecute")


def test_parse_changes() -> None:
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
def test_invalid_taints_are_errors(words: list[str], said: str) -> None:
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
def test_updated_taints(words: list[str], overwrite: bool, after: tuple[Taint, ...]) -> None:
    wish = taint.parse_changes(words)
    assert taint.updated_taints("mac-1", (ANNA, SLOW), wish, overwrite=overwrite) == after


@pytest.mark.parametrize("words", [["slow:NoExecute-"], ["nobody-"], ["slow=x:PreferNoSchedule"]])
def test_impossible_changes_are_errors(words: list[str]) -> None:
    with pytest.raises(FleetctlError):
        taint.updated_taints("mac-1", (ANNA, SLOW), taint.parse_changes(words), overwrite=False)
