"""Tests of the fields by which processes report their view of the store."""

import pytest

from schemas.wire.health import STALE_S, StoreState, StoreView


@pytest.mark.parametrize(("view", "state"), [
    (StoreView(0.0), StoreState.OK),
    (StoreView(STALE_S), StoreState.STALE),
    (StoreView(None), StoreState.STALE),
    (StoreView(0.0, "no password"), StoreState.REFUSED),
    (StoreView(None, "no password"), StoreState.REFUSED),
])  # fmt: skip
def test_a_refusal_counts_more_than_the_age(view: StoreView, state: StoreState) -> None:
    assert view.state is state
    assert view.fields()["store"] == state.value


def test_the_message_is_there_only_with_a_refusal() -> None:
    assert StoreView(1.23456).fields() == {"store": "ok", "storeStalenessSeconds": 1.235}
    assert StoreView(None, "no").fields() == {
        "store": "refused",
        "storeStalenessSeconds": None,
        "storeMessage": "no",
    }
