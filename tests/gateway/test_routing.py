"""Choosing an engine: situations one by one, and what holds in all of them."""

from collections import Counter
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.choosing import Chosen, NothingReady, Standing, UnknownModel, choose
from gateway.routing.table import Model, Origin, Share, Table, Target
from tests.gateway.world import target

A, B, C = (target(f"m-{n}", port=n + 1) for n in range(3))


def table(*shares: Share) -> Table:
    model = Model(name="m", created=0, shares=shares, reason="because.")
    return Table(models=MappingProxyType({"m": model}))


def leased(*targets: Target, weight: int = 1, orphans: tuple[Target, ...] = ()) -> Share:
    return Share(deployments=("m",), leased=targets, orphans=orphans, weight=weight)


def chosen(
    shares: tuple[Share, ...],
    *,
    busy: dict[Target, int] | None = None,
    penalised: tuple[Target, ...] = (),
    failed: tuple[Target, ...] = (),
    draw: float = 0.0,
) -> str | None:
    standing = Standing(
        in_flight={t.origin: n for t, n in (busy or {}).items()},
        penalised=frozenset(t.origin for t in penalised),
    )
    choice = choose(table(*shares), "m", standing, draw=draw, failed=frozenset(failed))
    return choice.target.replica if isinstance(choice, Chosen) else None


@pytest.mark.parametrize(
    ("shares", "situation", "expected"),
    [
        pytest.param((leased(B, A),), {}, "m-0", id="ties-go-by-name"),
        pytest.param((leased(A, B),), {"busy": {A: 2, B: 1}}, "m-1", id="least-in-flight"),
        pytest.param((leased(A, B),), {"failed": (A,)}, "m-1", id="never-who-failed"),
        pytest.param((leased(A),), {"failed": (A,)}, None, id="nobody-is-left"),
        pytest.param((leased(A, B),), {"penalised": (A,)}, "m-1", id="rather-not-penalised"),
        pytest.param((leased(A),), {"penalised": (A,)}, "m-0", id="penalised-but-alone"),
        pytest.param(
            (leased(A, B, C),), {"penalised": (A, C), "failed": (B,)}, "m-0", id="both-at-once"
        ),
        pytest.param((leased(A, orphans=(B,)),), {}, "m-0", id="leased-before-orphan"),
        pytest.param(
            (leased(A, orphans=(B,)),), {"penalised": (A,)}, "m-0", id="penalised-before-orphan"
        ),
        pytest.param((leased(orphans=(B,)),), {}, "m-1", id="orphan-as-last-resort"),
        pytest.param(
            (leased(A, orphans=(B,)),), {"failed": (A,)}, "m-1", id="orphan-when-leased-failed"
        ),
        pytest.param((leased(orphans=(B,)),), {"failed": (B,)}, None, id="failed-orphan"),
        pytest.param((leased(A, weight=9), leased(B)), {"draw": 0.89}, "m-0", id="weight-below"),
        pytest.param((leased(A, weight=9), leased(B)), {"draw": 0.91}, "m-1", id="weight-above"),
        pytest.param((leased(A), leased(B)), {"draw": 1.0}, "m-1", id="draw-of-one"),
        pytest.param((leased(A), leased()), {"draw": 0.9}, "m-0", id="empty-backend-is-passed-by"),
        pytest.param(
            (leased(A), leased(B)), {"draw": 0.9, "failed": (B,)}, "m-0", id="other-backend"
        ),
        pytest.param((leased(A, weight=0), leased(B)), {}, "m-1", id="weight-zero-gets-nothing"),
        pytest.param((leased(A, weight=0),), {}, None, id="only-weight-zero"),
        pytest.param((leased(),), {}, None, id="nobody"),
    ],
)
def test_who_is_chosen(shares: tuple[Share, ...], situation: dict, expected: str | None) -> None:  # type: ignore[type-arg]  # keyword arguments of `chosen`
    assert chosen(shares, **situation) == expected


def test_a_refusal_says_why() -> None:
    assert choose(table(leased()), "m", Standing(), draw=0) == NothingReady(reason="because.")


@pytest.mark.parametrize(
    ("name", "nearest"), [("n", None), ("mm", "m"), ("x" * 100_000, None), ("", None)]
)
def test_an_unknown_name_gets_the_nearest_known_one(name: str, nearest: str | None) -> None:
    expected = UnknownModel(known=("m",), nearest=nearest)
    assert choose(table(leased(A)), name, Standing(), draw=0) == expected


def test_a_republished_endpoint_may_be_tried_again() -> None:
    again = target("m-0", port=1, version=2)
    assert chosen((leased(again),), failed=(A,)) == "m-0"


engines = st.builds(
    lambda number, port, version: target(f"m-{number}", port=port, version=version),
    st.integers(0, 5),
    st.integers(1, 6),
    st.integers(1, 2),
)
some = st.lists(engines, max_size=5).map(tuple)
all_shares = st.lists(
    st.builds(
        Share,
        deployments=st.just(("m",)),
        weight=st.integers(0, 3),
        leased=some,
        orphans=some,
    ),
    min_size=1,
    max_size=3,
)
origins = st.builds(Origin, st.just("127.0.0.1"), st.integers(1, 6))
standings = st.builds(
    Standing,
    in_flight=st.dictionaries(origins, st.integers(1, 9)),
    penalised=st.frozensets(origins),
)


@given(shares=all_shares, standing=standings, draw=st.floats(0, 1), failed=st.frozensets(engines))
def test_what_always_holds(
    shares: list[Share], standing: Standing, draw: float, failed: frozenset[Target]
) -> None:
    choice = choose(table(*shares), "m", standing, draw=draw, failed=failed)
    able = [share for share in shares if share.weight > 0]
    left = [t for share in able for t in share.leased if t not in failed]
    orphans = [t for share in able for t in share.orphans if t not in failed]
    if not isinstance(choice, Chosen):
        assert not left
        assert not orphans
        return
    if left:
        assert choice.target in left
    else:
        assert choice.target in orphans
    if any(t.origin not in standing.penalised for t in left):
        assert choice.target.origin not in standing.penalised


@given(
    engines=some,
    standing=standings,
    failed=st.frozensets(engines),
    mix=st.randoms(use_true_random=False),
)
def test_order_of_input_changes_nothing(
    engines: tuple[Target, ...], standing: Standing, failed: frozenset[Target], mix: object
) -> None:
    mixed = list(engines)
    mix.shuffle(mixed)  # type: ignore[attr-defined]  # hypothesis' Random
    one = choose(table(leased(*engines)), "m", standing, draw=0.5, failed=failed)
    assert one == choose(table(leased(*mixed)), "m", standing, draw=0.5, failed=failed)


@given(shares=all_shares, standing=standings, draw=st.floats(0, 1), order=st.permutations(range(3)))
def test_trying_again_and_again_tries_everybody_once(
    shares: list[Share], standing: Standing, draw: float, order: list[int]
) -> None:
    failed: set[Target] = set()
    while isinstance(
        choice := choose(table(*shares), "m", standing, draw=draw, failed=failed), Chosen
    ):
        assert choice.target not in failed
        failed.add(choice.target)
    assert failed == {
        t for share in shares if share.weight for t in (*share.leased, *share.orphans)
    }


def test_equals_take_turns() -> None:
    """At low load no engine may be asked always, and none never."""
    asked = Counter(chosen((leased(A, B, C),), draw=n / 1000) for n in range(1000))
    assert set(asked) == {"m-0", "m-1", "m-2"}
    assert min(asked.values()) > 250
