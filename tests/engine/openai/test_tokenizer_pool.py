"""Tokenizer threads: work that grows with the messages, huge prompts beside short ones, and clients that leave."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from typing_extensions import override

from engine.openai import input_processor
from engine.openai.input_processor import StopSignal, TokenizerPool
from engine.text.template_traits import TemplateTraits
from tests.support.engine_requests import chat, complete

pytestmark = pytest.mark.timeout(60)


class CountedTurn(dict[str, Any]):
    """A message that counts how often it is read."""

    reads = 0

    @override
    def __getitem__(self, key: str) -> Any:
        CountedTurn.reads += 1
        return super().__getitem__(key)

    @override
    def __contains__(self, key: object) -> bool:
        CountedTurn.reads += 1
        return super().__contains__(key)


@dataclass
class FakeCodec:
    """A codec that counts what it encodes, and waits before each text if it has a gate."""

    gate: threading.Event | None = None
    began: threading.Event = field(default_factory=threading.Event)
    texts: int = 0
    chats: int = 0
    has_chat_template: bool = True
    traits: TemplateTraits = field(default_factory=TemplateTraits)

    def encode_text(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        self.texts += 1
        self.began.set()
        if self.gate is not None:
            assert self.gate.wait(30)
        return [len(text)]

    def encode_chat(
        self, messages: Sequence[Any], *, max_tokens: int | None = None, **_: Any
    ) -> list[int]:
        self.chats += 1
        return [hash(str([sorted(dict(message).items()) for message in messages[-3:]])) % 1000]


def counted(*, named: bool) -> int:
    """Return the reads of 4,000 messages, of which the last has a name."""
    turns = [CountedTurn(role="user", content="x") for _ in range(4000)]
    if named:
        turns[-1]["name"] = "Bob"
    CountedTurn.reads = 0
    encoder: Any = FakeCodec()
    input_processor._encode_chat(turns, encoder, StopSignal())
    return CountedTurn.reads


@pytest.mark.parametrize("named", [False, True])
def test_the_check_of_names_reads_each_message_a_few_times(*, named: bool) -> None:
    assert counted(named=named) < 5 * 4000


def test_one_name_of_each_role_is_checked() -> None:
    roles = ("system", "user", "assistant", "user", "assistant", "tool")
    turns = [{"role": role, "content": str(at), "name": "N"} for at, role in enumerate(roles)]
    encoder: Any = FakeCodec()
    input_processor._encode_chat(turns[-3:], encoder, StopSignal())
    assert (
        encoder.chats == 1 + 2
    )  # the prompt, a user and an assistant; a tool's name is its function's


@pytest.fixture
def pool() -> Iterator[TokenizerPool]:
    made = TokenizerPool()
    yield made
    made.close()


async def test_thousands_of_empty_messages_are_long_work(pool: TokenizerPool) -> None:
    async def thread_of(request: Any) -> str:
        length = input_processor.work_length(request)
        return await pool.run(length, lambda _: threading.current_thread().name)

    many = [{"role": "user", "content": ""}] * 4096
    assert "short" not in await thread_of(chat(messages=many))
    assert "short" in await thread_of(chat(messages=many[:100]))
    assert "short" not in await thread_of(complete(prompt="x" * 60_000))


async def test_a_client_that_leaves_stops_its_prompts_between_two_of_them(
    pool: TokenizerPool,
) -> None:
    codec: Any = FakeCodec(gate=threading.Event())
    request = complete(prompt=["one", "two", "three"])

    async def encode() -> None:
        await pool.run(1, lambda stop: input_processor.encode_prompts(request, codec, stop))

    async with asyncio.TaskGroup() as group:
        working = group.create_task(encode())
        assert await asyncio.to_thread(codec.began.wait, 30)
        working.cancel()
    codec.gate.set()
    assert await pool.run(1, lambda _: codec.texts) == 1  # the thread is free, after one prompt


async def test_work_of_a_client_that_left_does_not_begin(pool: TokenizerPool) -> None:
    gate, began = threading.Event(), threading.Event()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(pool.run(1, lambda _: gate.wait(30)))
        second = group.create_task(pool.run(1, lambda _: began.set()))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        gate.set()
        assert await first
    assert await pool.run(1, lambda _: began.is_set()) is False
