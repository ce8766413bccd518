"""Who fits into what memory: situations, and what holds in all of them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.jobs import Job, SamplingParams
from engine.memory.budget import PROCESS_BYTES, MemoryBudget, MemoryRequest, full_bytes, make_budget
from engine.memory.guard import MemoryAdvice, MemoryGuard
from engine.memory.pressure import PressureLevel
from models.footprint import KvFootprint, ServingLoad

MIB = 2**20
# 1 KiB a token and a state of 10 KiB.
RULE = KvFootprint(constant_bytes=10 * 1024, token_bytes=1024)
LOAD = ServingLoad(context_length=1024, concurrency=4)
FULL = full_bytes(RULE, LOAD)


def budget(
    *, room: int, promised: bool = True, prefix: int | None = None, load: ServingLoad = LOAD
) -> MemoryBudget:
    """Share out what has `room` above weights and activations."""
    weights, activations = 7 * MIB, 3 * MIB
    limit = PROCESS_BYTES + weights + activations + room
    wishes = MemoryRequest(promised_bytes=limit if promised else None, prefix_bytes=prefix)
    return make_budget(RULE, load, wishes, machine_bytes=limit, held=(weights, activations))


def job(at: int, tokens: int) -> Job:
    """A job whose sequence ends at so many tokens."""
    prompt = (1,) * min(5, tokens - 1)
    return Job(
        id=at,
        prompt=prompt,
        max_tokens=tokens - len(prompt),
        sampling=SamplingParams(temperature=0),
    )


rules = st.builds(
    KvFootprint,
    constant_bytes=st.integers(0, 10**6),
    token_bytes=st.integers(0, 10**5),
    windows=st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 10**4)), max_size=2).map(tuple),
)
loads = st.builds(
    ServingLoad,
    context_length=st.integers(2, 10_000),
    concurrency=st.integers(1, 16),
    draft_tokens=st.integers(0, 4),
)
wishes = st.builds(
    MemoryRequest,
    promised_bytes=st.none() | st.integers(1, 2**33),
    prefix_bytes=st.none() | st.integers(0, 2**31),
)
sizes = st.integers(0, 2**33)
budgets = st.builds(
    lambda rule, load, wish, machine, held: make_budget(
        rule, load, wish, machine_bytes=machine, held=held
    ),
    rules,
    loads,
    wishes,
    sizes,
    st.tuples(sizes, sizes),
)
lengths = st.lists(st.integers(2, 10_000), max_size=8)


def test_steps_and_windows() -> None:
    rule = KvFootprint(constant_bytes=7, token_bytes=10, windows=((100, 3), (300, 5)))
    assert rule.sequence_bytes(0) == 7
    assert rule.sequence_bytes(1) == 7 + 2560 + 300 + 256 * 5
    assert rule.sequence_bytes(256) == 7 + 2560 + 300 + 1500
    assert rule.sequence_bytes(257) == 7 + 5120 + 300 + 1500
    assert rule.batch_bytes(3, 257) == 3 * rule.sequence_bytes(257)
    assert rule.reading_bytes(10) == 80
    both = rule + KvFootprint(constant_bytes=1, token_bytes=2, windows=((9, 1),))
    assert both.sequence_bytes(300) == rule.sequence_bytes(300) + 1 + 1024 + 9


@given(rules, st.integers(0, 2**32), st.integers(0, 20_000))
def test_the_longest_that_fits_is_the_longest(rule: KvFootprint, limit: int, most: int) -> None:
    longest = rule.longest_within(limit, most)
    assert longest == 0 or rule.sequence_bytes(longest) <= limit
    assert longest == most or rule.sequence_bytes(longest + 1) > limit


@given(budgets, lengths)
def test_no_byte_is_given_away_twice(shared: MemoryBudget, running: list[int]) -> None:
    parts = shared.weights_bytes + shared.activation_bytes + shared.kv_bytes
    assert parts + shared.prefix_kept_bytes <= max(
        shared.limit_bytes, shared.weights_bytes + shared.activation_bytes
    )
    if shared.fits(running):
        taken = shared.needs(running) + shared.prefix_bytes(running)
        assert taken <= shared.kv_bytes + shared.prefix_kept_bytes
    assert shared.prefix_bytes(running) >= 0


@given(budgets, st.integers(1, 5000), st.integers(1, 5000))
def test_who_fits_alone_is_never_refused_and_nobody_else_is_taken(
    shared: MemoryBudget, prompt: int, wanted: int
) -> None:
    refusal = shared.refuse(prompt, wanted, param="prompt")
    if prompt + wanted <= shared.load.context_length:
        assert (refusal is None) == (prompt + wanted <= shared.longest)
    assert (refusal is None) == shared.fits([prompt + wanted])


@settings(max_examples=50)
@given(budgets, st.lists(st.integers(2, 4000), min_size=1, max_size=12), st.data())
def test_jobs_that_run_never_hold_more_than_there_is(
    shared: MemoryBudget, wanted: list[int], data: st.DataObject
) -> None:
    memory = MemoryGuard(budget=shared)
    waiting = [job(at, tokens) for at, tokens in enumerate(wanted) if shared.fits([tokens])]
    running: list[Job] = []
    while waiting:
        if memory.may_join(waiting[0]):
            running.append(waiting.pop(0))
            memory.joined(running[-1])
        else:
            assert running, "one that fits alone waits for nobody"
            memory.left(running.pop(data.draw(st.integers(0, len(running) - 1))).id)
        used = data.draw(sizes)
        advice = memory.look(used, 0, data.draw(sizes))
        assert memory.promised_bytes <= shared.kv_bytes
        prefix = advice.prefix_limit_bytes
        assert memory.promised_bytes + prefix <= shared.kv_bytes + shared.prefix_kept_bytes


def test_a_promise_made_for_full_contexts_is_kept() -> None:
    shared = budget(room=FULL)
    assert shared.kv_bytes == FULL
    memory = MemoryGuard(budget=shared)
    for at in range(4):
        assert memory.may_join(job(at, 1024))
        memory.joined(job(at, 1024))
    assert not memory.may_join(job(4, 2))
    memory.left(2)
    assert memory.may_join(job(4, 2))
    assert not memory.may_join(job(4, 2), job(5, 2))


def test_the_longest_counts_for_all_of_a_batch() -> None:
    memory = MemoryGuard(budget=budget(room=FULL))
    for at in range(5):
        memory.joined(job(at, 256))
    assert memory.promised_bytes == 5 * (256 + 10) * 1024
    # Alone it takes a quarter; but it would make the others' rows as long as itself.
    assert not memory.may_join(job(5, 1024))
    for at in range(2):
        memory.left(at)
    assert memory.may_join(job(5, 1024))


def test_without_a_promise_something_is_kept_back() -> None:
    promised, guessed = (budget(room=100 * MIB, promised=made) for made in (True, False))
    assert promised.kv_bytes == 100 * MIB
    assert guessed.kv_bytes == int(0.95 * 103 * MIB) - 3 * MIB


def test_the_prefix_cache_lives_in_what_is_left() -> None:
    memory = MemoryGuard(budget=budget(room=FULL + MIB))
    assert prefix(memory) == memory.budget.limit_bytes // 4
    for at in range(4):
        memory.joined(job(at, 1024))
    assert prefix(memory) == MIB


def test_a_prefix_cache_of_its_own_size_is_never_touched_by_requests() -> None:
    memory = MemoryGuard(budget=budget(room=FULL + 3 * MIB, prefix=2 * MIB))
    assert memory.budget.kv_bytes == FULL + MIB
    assert prefix(memory) == 2 * MIB
    for at in range(4):
        memory.joined(job(at, 1024))
    assert prefix(memory) == 2 * MIB
    assert not memory.may_join(job(4, 1024))


def test_a_prefix_cache_never_takes_what_full_contexts_need() -> None:
    shared = budget(room=FULL + MIB, prefix=2**30)
    assert (shared.kv_bytes, shared.prefix_kept_bytes) == (FULL, MIB)
    assert budget(room=FULL // 2, prefix=2**30).prefix_kept_bytes == 0
    assert prefix(MemoryGuard(budget=budget(room=FULL, prefix=0))) == 0


def prefix(memory: MemoryGuard) -> int:
    """What the prefix cache may hold when all is well."""
    return memory.look(memory.budget.weights_bytes, 0, 0).prefix_limit_bytes


def test_what_can_never_run_is_refused_with_the_figures() -> None:
    shared = budget(room=600 * 1024)  # 10 of state, 590 of tokens: two steps
    assert shared.longest == 512
    assert shared.refuse(500, 12, param="messages") is None
    refusal = shared.refuse(500, 13, param="messages")
    assert refusal is not None
    assert (refusal.status, refusal.param, refusal.code) == (400, "messages", "kv_budget_exceeded")
    assert refusal.message == (
        "This request needs 778 KiB of memory for the 513 tokens you requested (500 in the messages, 13 in the "
        "completion), and this replica has 600 KiB for all requests together, which is enough for 512 tokens. "
        "Please reduce the length of the messages or completion."
    )


def test_guesses_count() -> None:
    load = ServingLoad(context_length=1024, concurrency=4, draft_tokens=3)
    shared = budget(room=600 * 1024, load=load)
    assert shared.longest == 509
    assert not shared.fits([510])


def test_too_little_for_anybody_is_said() -> None:
    assert budget(room=266 * 1024).complaint == ""
    complaint = budget(room=265 * 1024).complaint
    assert "leaves 265 KiB for requests, and one of 256 tokens needs 266 KiB" in complaint
    tiny = budget(room=0, load=ServingLoad(context_length=16, concurrency=1))
    assert tiny.complaint


def test_pressure_stops_joins_until_it_is_gone() -> None:
    memory = MemoryGuard(budget=budget(room=FULL))
    weights, limit = memory.budget.weights_bytes, memory.budget.limit_bytes
    room = limit - weights
    memory.joined(job(0, 300))
    calm = memory.look(weights, 0, 0)
    assert (calm.chunk_factor, calm.may_join, calm.clear_buffers) == (1.0, True, False)
    bad = memory.look(weights + room // 2, room // 2, MIB)
    assert bad == MemoryAdvice(
        prefix_limit_bytes=0, chunk_factor=0.0, may_join=False, clear_buffers=True
    )
    assert memory.level is PressureLevel.CRITICAL
    assert not memory.may_join(job(1, 300))
    memory.look(weights + int(0.86 * room), 0, 0)
    assert not memory.may_join(job(1, 300))
    assert memory.look(weights + int(0.84 * room), 0, 0).may_join
    assert memory.may_join(job(1, 300))


def test_with_nobody_running_there_is_nothing_to_wait_for() -> None:
    memory = MemoryGuard(budget=budget(room=FULL))
    assert memory.look(2**40, 0, 0).may_join
    assert memory.may_join(job(0, 300))
    memory.joined(job(0, 300))
    assert not memory.may_join(job(1, 300))
    memory.left(0)
    memory.left(0)
    assert memory.may_join(job(1, 300))
