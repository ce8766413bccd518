"""Memory budgets and the guard: tables of situations, and properties of all of them."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RefusedError
from engine.jobs import Job, SamplingParams
from engine.memory.budget import PROCESS_BYTES, MemoryBudget, MemoryRequest, full_bytes, make_budget
from engine.memory.guard import MemoryAdvice, MemoryGuard
from engine.memory.pressure import PressureLevel
from engine.openai import limits, request_body
from engine.openai.request_body import GenerationRequest
from models.footprint import ROW_STEP, KvFootprint, ServingLoad, cache_slots
from tests.support.sampling import samples

MIB = 2**20
# 1 KiB a token and a state of 10 KiB.
RULE = KvFootprint(constant_bytes=10 * 1024, token_bytes=1024)
LOAD = ServingLoad(context_length=1024, concurrency=4)
FULL = full_bytes(RULE, LOAD)
STEP = ROW_STEP * 1024
# A token is a byte, and there is room for two steps of 256.
SMALL = MemoryBudget(
    footprint=KvFootprint(token_bytes=1),
    limit_bytes=1000,
    weights_bytes=300,
    activation_bytes=100,
    kv_bytes=600,
    prefix_kept_bytes=0,
    prefix_most_bytes=100,
    load=ServingLoad(context_length=4096, concurrency=4),
)


def budget(
    *, room: int, promised: bool = True, prefix: int | None = None, load: ServingLoad = LOAD
) -> MemoryBudget:
    """Return a budget with `room` above weights and activations."""
    weights, activations = 7 * MIB, 3 * MIB
    limit = PROCESS_BYTES + weights + activations + room
    memory_request = MemoryRequest(promised_bytes=limit if promised else None, prefix_bytes=prefix)
    return make_budget(RULE, load, memory_request, machine_bytes=limit, held=(weights, activations))


def job(at: int, tokens: int) -> Job:
    """Return a job whose sequence ends after the given number of tokens."""
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
    lambda footprint, load, wish, machine, held: make_budget(
        footprint, load, wish, machine_bytes=machine, held=held
    ),
    rules,
    loads,
    wishes,
    sizes,
    st.tuples(sizes, sizes),
)
lengths = st.lists(st.integers(2, 10_000), max_size=8)


def test_steps_and_windows() -> None:
    footprint = KvFootprint(constant_bytes=7, token_bytes=10, windows=((100, 3), (300, 5)))
    assert footprint.sequence_bytes(0) == 7
    assert footprint.sequence_bytes(1) == 7 + 2560 + 300 + 256 * 5
    assert footprint.sequence_bytes(256) == 7 + 2560 + 300 + 1500
    assert footprint.sequence_bytes(257) == 7 + 5120 + 300 + 1500
    assert footprint.batch_bytes([257] * 3) == 3 * footprint.sequence_bytes(257)
    assert footprint.reading_bytes(10) == 80
    both = footprint + KvFootprint(constant_bytes=1, token_bytes=2, windows=((9, 1),))
    assert both.sequence_bytes(300) == footprint.sequence_bytes(300) + 1 + 1024 + 9


@given(rules, st.integers(0, 2**32), st.integers(0, 20_000))
def test_longest_within_is_exact(footprint: KvFootprint, limit: int, most: int) -> None:
    longest = footprint.longest_within(limit, most)
    assert longest == 0 or footprint.sequence_bytes(longest) <= limit
    assert longest == most or footprint.sequence_bytes(longest + 1) > limit


@given(budgets, lengths)
def test_no_byte_is_promised_twice(shared: MemoryBudget, running: list[int]) -> None:
    parts = shared.weights_bytes + shared.activation_bytes + shared.kv_bytes
    assert parts + shared.prefix_kept_bytes <= max(
        shared.limit_bytes, shared.weights_bytes + shared.activation_bytes
    )
    if shared.fits(running):
        taken = shared.needs(running) + shared.prefix_bytes(running)
        assert taken <= shared.kv_bytes + shared.prefix_kept_bytes
    assert shared.prefix_bytes(running) >= 0


@given(budgets, st.integers(1, 5000), st.integers(1, 5000))
def test_exactly_the_requests_that_fit_alone_are_accepted(
    shared: MemoryBudget, prompt: int, wanted: int
) -> None:
    refusal = shared.refuse(prompt, wanted, param="prompt")
    if prompt + wanted <= shared.load.context_length:
        assert (refusal is None) == (prompt + wanted <= shared.longest)
    assert (refusal is None) == shared.fits([prompt + wanted])


@settings(max_examples=samples(50))
@given(budgets, st.lists(st.integers(2, 4000), min_size=1, max_size=12), st.data())
def test_running_jobs_never_exceed_the_memory(
    shared: MemoryBudget, wanted: list[int], data: st.DataObject
) -> None:
    memory = MemoryGuard(budget=shared)
    waiting = [job(at, tokens) for at, tokens in enumerate(wanted) if shared.fits([tokens])]
    running: list[Job] = []
    while waiting:
        if memory.may_join(waiting[0]):
            running.append(waiting.pop(0))
            memory.reserve(running[-1])
        else:
            assert running, "one that fits alone waits for nobody"
            memory.release(running.pop(data.draw(st.integers(0, len(running) - 1))).id)
        used = data.draw(sizes)
        advice = memory.advise(used, 0, data.draw(sizes))
        assert memory.promised_bytes <= shared.kv_bytes
        prefix = advice.prefix_limit_bytes
        assert memory.promised_bytes + prefix <= shared.kv_bytes + shared.prefix_kept_bytes


def test_the_longest_sequence_counts_for_the_whole_batch() -> None:
    memory = MemoryGuard(budget=budget(room=FULL))
    for at in range(5):
        memory.reserve(job(at, 256))
    assert memory.promised_bytes == 5 * (256 + 10) * 1024
    # Alone it takes a quarter; but it would make the others' rows as long as itself.
    assert not memory.may_join(job(5, 1024))
    for at in range(2):
        memory.release(at)
    assert memory.may_join(job(5, 1024))


def by_rows(steps: int, *, guesses: int = 0) -> MemoryGuard:
    """Return a guard for rows of their own, and memory for this many steps of 64 tokens; a step is 64 KiB."""
    load = dataclasses.replace(LOAD, draft_tokens=guesses)
    shared = dataclasses.replace(
        budget(room=steps * STEP, load=load), footprint=KvFootprint(token_bytes=1024, by_rows=True)
    )
    return MemoryGuard(budget=shared)


def test_a_job_gets_much_memory_while_there_is_plenty_and_little_later() -> None:
    memory = by_rows(10)
    memory.reserve(job(0, 400))  # 5 tokens and 256 new ones
    assert memory.promised_bytes == 5 * STEP
    assert memory.take_reserves() == ((0, 320),)
    assert memory.may_join(job(1, 400))
    memory.reserve(job(1, 400))
    assert memory.take_reserves() == ((1, 64),)
    # There is room for a third one, but then not for two more steps of each.
    assert not memory.may_join(job(2, 400))
    assert memory.grow({0: 320, 1: 64}) == ()
    assert memory.take_reserves() == ()
    assert memory.grow({0: 321, 1: 65}) == ()
    assert memory.take_reserves() == ((0, 384), (1, 128))
    assert memory.grow({0: 400, 1: 192}) == ()
    assert memory.promised_bytes == 10 * STEP
    assert memory.grow({0: 400, 1: 193}) == (1,)
    assert memory.take_reserves() == ((0, 400),)
    assert memory.promised_bytes == 7 * STEP
    assert not memory.may_join(job(1, 400))  # it now gets all seven steps at once


def test_the_youngest_gives_up_its_memory_and_the_oldest_does_not() -> None:
    memory = by_rows(14)
    for one in (job(0, 700), job(1, 300), job(2, 300)):
        assert memory.may_join(one)
        memory.reserve(one)
    assert memory.promised_bytes == 7 * STEP
    assert memory.grow({0: 321, 1: 193, 2: 257}) == (2,)
    assert memory.promised_bytes == 10 * STEP
    assert memory.preemptions == 1
    assert not memory.may_join(job(2, 300))
    memory.release(1)
    assert memory.may_join(job(2, 300))
    memory.reserve(job(2, 300))
    assert memory.promised_bytes == 11 * STEP
    # The oldest has no more memory, and the other one was stopped before: it is stopped again, not the oldest.
    assert memory.grow({0: 577, 2: 100}) == (2,)
    memory.release(0)
    memory.release(2)
    assert memory.promised_bytes == 0
    assert memory.may_join(job(2, 1000), job(3, 1000), job(4, 1000))


@settings(max_examples=samples(50))
@given(st.lists(st.integers(2, 1024), min_size=1, max_size=12), st.integers(0, 5), st.data())
def test_rows_never_exceed_the_memory_and_all_of_them_end(
    wanted: list[int], guesses: int, data: st.DataObject
) -> None:
    memory = by_rows(data.draw(st.integers(17, 48)), guesses=guesses)
    waiting = [job(at, tokens) for at, tokens in enumerate(wanted)]
    running: dict[int, int] = {}
    reserved: dict[int, int] = {}
    slots: dict[int, int] = {}
    """The tokens for which the caches of each job have allocated memory."""
    for _ in range(5_000):
        after = {at: min(tokens + 64, wanted[at]) for at, tokens in running.items()}
        for at in memory.grow(after):
            one = job(at, wanted[at])
            made = running.pop(at) - len(one.prompt)
            waiting.insert(0, dataclasses.replace(one, emitted=(1,) * made))
            del after[at], slots[at]
        while waiting and memory.may_join(waiting[0]):
            first = waiting.pop(0)
            memory.reserve(first)
            running[first.id] = len(first.prompt) + len(first.emitted)
            slots[first.id] = 0
        reserved.update(memory.take_reserves())
        for at, tokens in running.items():
            fed = after[at] + guesses if at in after else tokens
            assert fed <= reserved[at]
            if fed > slots[at]:
                slots[at] = cache_slots(fed, reserved[at])
        assert sum(slots.values()) * 1024 <= memory.promised_bytes <= memory.budget.kv_bytes
        running.update(after)
        for at in after:
            if running[at] == wanted[at]:
                memory.release(at)
                del running[at], slots[at]
    assert (running, waiting, memory.promised_bytes) == ({}, [], 0)


def test_without_a_promise_some_memory_is_kept_back() -> None:
    promised, guessed = (budget(room=100 * MIB, promised=made) for made in (True, False))
    assert promised.kv_bytes == 100 * MIB
    assert guessed.kv_bytes == int(0.95 * 103 * MIB) - 3 * MIB


def test_requests_never_use_a_reserved_prefix_cache() -> None:
    memory = MemoryGuard(budget=budget(room=FULL + 3 * MIB, prefix=2 * MIB))
    assert memory.budget.kv_bytes == FULL + MIB
    assert prefix(memory) == 2 * MIB
    for at in range(4):
        memory.reserve(job(at, 1024))
    assert prefix(memory) == 2 * MIB
    assert not memory.may_join(job(4, 1024))


def test_a_reserved_prefix_cache_leaves_room_for_full_contexts() -> None:
    shared = budget(room=FULL + MIB, prefix=2**30)
    assert (shared.kv_bytes, shared.prefix_kept_bytes) == (FULL, MIB)
    assert budget(room=FULL // 2, prefix=2**30).prefix_kept_bytes == 0
    assert prefix(MemoryGuard(budget=budget(room=FULL, prefix=0))) == 0


def prefix(memory: MemoryGuard) -> int:
    """Return the limit of the prefix cache without pressure."""
    return memory.advise(memory.budget.weights_bytes, 0, 0).prefix_limit_bytes


def test_a_request_that_can_never_run_is_refused_with_numbers() -> None:
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


def test_draft_tokens_count() -> None:
    load = ServingLoad(context_length=1024, concurrency=4, draft_tokens=3)
    shared = budget(room=600 * 1024, load=load)
    assert shared.longest == 509
    assert not shared.fits([510])


def test_a_shortage_is_explained() -> None:
    assert budget(room=266 * 1024).shortage == ""
    shortage = budget(room=265 * 1024).shortage
    assert "leaves 265 KiB for requests, and one of 256 tokens needs 266 KiB" in shortage
    tiny = budget(room=0, load=ServingLoad(context_length=16, concurrency=1))
    assert tiny.shortage


def test_critical_pressure_stops_joins_until_it_is_over() -> None:
    memory = MemoryGuard(budget=budget(room=FULL))
    weights, limit = memory.budget.weights_bytes, memory.budget.limit_bytes
    room = limit - weights
    memory.reserve(job(0, 300))
    calm = memory.advise(weights, 0, 0)
    assert (calm.chunk_factor, calm.may_join, calm.clear_buffers) == (1.0, True, False)
    bad = memory.advise(weights + room // 2, room // 2, MIB)
    assert bad == MemoryAdvice(
        prefix_limit_bytes=0, chunk_factor=0.0, may_join=False, clear_buffers=True
    )
    assert memory.level is PressureLevel.CRITICAL
    assert not memory.may_join(job(1, 300))
    memory.advise(weights + int(0.86 * room), 0, 0)
    assert not memory.may_join(job(1, 300))
    assert memory.advise(weights + int(0.84 * room), 0, 0).may_join
    assert memory.may_join(job(1, 300))


def chat(**fields: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "x"}]
    return request_body.parse_chat(
        json.dumps({"model": "m", "messages": messages} | fields).encode()
    )


def completion(**fields: Any) -> GenerationRequest:
    return request_body.parse_completion(
        json.dumps({"model": "m", "prompt": "x"} | fields).encode()
    )


@pytest.mark.parametrize(
    ("request_", "prompt", "wanted", "found"),
    [
        pytest.param(chat(), 12, 4084, 500, id="all-that-is-left"),
        pytest.param(chat(), 511, 3585, 1, id="one-token-left"),
        pytest.param(chat(max_tokens=500), 12, 500, 500, id="just-fits"),
        pytest.param(completion(), 500, 16, 12, id="less-than-the-default"),
        pytest.param(completion(), 5, 16, 16, id="the-default"),
    ],
)
def test_requests_that_fit_get_their_tokens(
    request_: GenerationRequest, prompt: int, wanted: int, found: int
) -> None:
    assert limits.fit_to_memory(SMALL, request_, prompt, wanted) == found
    assert limits.fit_to_memory(None, request_, prompt, wanted) == wanted


@pytest.mark.parametrize(
    ("request_", "prompt", "wanted", "param"),
    [
        pytest.param(chat(max_tokens=501), 12, 501, "messages", id="asked-for-too-much"),
        pytest.param(chat(), 512, 3584, "messages", id="no-room-for-an-answer"),
        pytest.param(completion(), 4000, 16, "prompt", id="too-long-a-prompt"),
    ],
)
def test_requests_that_can_never_fit_are_refused(
    request_: GenerationRequest, prompt: int, wanted: int, param: str
) -> None:
    with pytest.raises(RefusedError, match="enough for 512 tokens") as caught:
        limits.fit_to_memory(SMALL, request_, prompt, wanted)
    refusal = caught.value.refusal
    assert (refusal.status, refusal.code, refusal.param) == (400, "kv_budget_exceeded", param)


def test_rotating_layers_admit_long_requests() -> None:
    rotating = dataclasses.replace(SMALL, footprint=KvFootprint(windows=((500, 1),)))
    assert rotating.longest == 4096
    assert limits.fit_to_memory(rotating, chat(max_tokens=4000), 96, 4000) == 4000
