"""The prompts that an engine remembers for its successor, within a budget."""

from engine.jobs import Job, SamplingParams
from engine.recent_prompts import PromptHistory
from schemas.wire.recent_prompts import MAX_PROMPT_TOKENS, MAX_PROMPTS, MAX_TOKENS


def job(tokens: range, salt: str = "") -> Job:
    return Job(
        id=1,
        prompt=tuple(tokens),
        max_tokens=1,
        sampling=SamplingParams(temperature=0),
        cache_salt=salt,
    )


def remembered(*jobs: Job) -> list[tuple[str, int, int]]:
    """Return salt, first token and length of each prompt, newest first."""
    history = PromptHistory()
    for one in jobs:
        history.add([one])
    return [
        (prompt.salt, prompt.tokens[0], len(prompt.tokens)) for prompt in history.report().prompts
    ]


def test_of_a_conversation_only_the_last_turn_is_remembered() -> None:
    turns = [job(range(100)), job(range(500, 700)), job(range(300)), job(range(200))]
    assert remembered(*turns) == [("", 0, 300), ("", 500, 200)]


def test_prompts_of_other_salts_are_others() -> None:
    assert remembered(job(range(100)), job(range(200), "ab:x")) == [("ab:x", 0, 200), ("", 0, 100)]


def test_short_prompts_are_not_worth_a_place() -> None:
    assert remembered(job(range(63))) == []


def test_the_oldest_prompts_leave_when_the_budget_is_spent() -> None:
    many = [job(range(at * 1000, at * 1000 + 100)) for at in range(MAX_PROMPTS + 9)]
    found = remembered(*many)
    assert (len(found), found[0][1]) == (MAX_PROMPTS, (MAX_PROMPTS + 8) * 1000)
    long = [job(range(at, at + MAX_PROMPT_TOKENS * 2)) for at in range(9)]
    assert [each[2] for each in remembered(*long)] == [MAX_PROMPT_TOKENS] * (
        MAX_TOKENS // MAX_PROMPT_TOKENS
    )
