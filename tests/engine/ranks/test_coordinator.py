"""Rank 0's coordinator: agreement of the ranks, and loss of a rank."""

import socket
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.batch.step_plan import StepPlan
from engine.errors import GroupError
from engine.ranks import coordinator
from engine.ranks.messages import LoadedMessage, StartMessage

LOADED = LoadedMessage(
    rank=0, model="m", prefix_bytes=100, token_bytes=8, checkpoint_tokens=0, room=1.0
)


@pytest.mark.parametrize(
    ("others", "start"),
    [
        (
            [{"prefix_bytes": 40}, {"prefix_bytes": 70}],
            StartMessage(prefix_bytes=40, token_bytes=None),
        ),
        ([{"token_bytes": 16}, {}], StartMessage(prefix_bytes=100, token_bytes=16)),
        (
            [{"token_bytes": 16, "checkpoint_tokens": 512}],
            StartMessage(prefix_bytes=0, token_bytes=None),
        ),
        ([{"by_rows": False}], StartMessage(prefix_bytes=100, token_bytes=None)),
        ([{"by_rows": True}], StartMessage(prefix_bytes=100, token_bytes=None, by_rows=True)),
    ],
    ids=[
        "the smallest",
        "unequal stages",
        "unequal stages that rotate",
        "a stage that is padded",
        "rows of their own",
    ],
)
def test_ranks_agree_on_common_values(
    others: Sequence[dict[str, object]], start: StartMessage
) -> None:
    leader = replace(LOADED, by_rows=any("by_rows" in other for other in others))
    ranks = [leader, *(replace(LOADED, rank=1, **other) for other in others)]  # type: ignore[arg-type]
    assert coordinator.agree(ranks) == start


def test_requests_get_the_room_of_the_smallest_rank() -> None:
    assert coordinator.smallest_kv_share([LOADED, replace(LOADED, room=0.25)]) == 0.25


def test_another_model_ends_the_group() -> None:
    with pytest.raises(GroupError, match="rank 1 has another model"):
        coordinator.agree([LOADED, replace(LOADED, rank=1, model="other")])


def test_a_lost_rank_is_noticed_at_the_next_plan() -> None:
    one, other = socket.socketpair()
    with one:
        leader = coordinator.Coordinator(channels=[one])
        other.close()
        with pytest.raises(GroupError, match="rank 1 was lost"):
            leader.send_plan(StepPlan(decodes=True))
