"""Tests of prompts with names and template variables, on a real tokenizer with templates that have a place for them or not."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.openai import output_format, prompt_encoder
from engine.openai.input_processor import decode_tokens
from engine.openai.input_tasks import PromptsTask
from engine.openai.prompt_encoder import encode_prompts
from engine.text.codec import TextCodec
from engine.text.formats import pythonic
from engine.text.template_traits import TemplateTraits
from schemas.wire.errors import RefusedError
from tests.support.engine_requests import chat
from tests.support.text_codecs import byte_level, load

pytestmark = pytest.mark.mlx
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False, "required": []}
BODY = "{{ message.role }}: {{ message.content }}\n"
PLAIN = "{% for message in messages %}" + BODY + "{% endfor %}"
NAMED = (
    "{% for message in messages %}{% if message.name %}[{{ message.name }}] {% endif %}"
    + BODY
    + "{% endfor %}"
)
SWITCHED = (
    PLAIN + "{% if enable_thinking is defined and not enable_thinking %}no thinking{% endif %}"
)
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "hi", "name": "Bob"},
    {"role": "assistant", "content": "hello", "name": "researcher"},
    {"role": "user", "content": "and I", "name": "Ann"},
    {"role": "user", "content": "nobody"},
]


def prompt(codec: TextCodec, **fields: Any) -> str:
    (tokens,) = encode_prompts(chat(**fields), codec)
    return decode_tokens(tokens, codec)


def codec_of(folder: Path, template: str) -> TextCodec:
    return load(folder, byte_level(), chat_template=template)


def test_what_the_template_has_no_place_for_is_ignored_or_refused(tmp_path: Path) -> None:
    plain, switched = codec_of(tmp_path / "a", PLAIN), codec_of(tmp_path / "b", SWITCHED)
    high, none = {"reasoning_effort": "high"}, {"reasoning_effort": "none"}
    variables = {"chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": True}}
    cases: list[tuple[TextCodec, dict[str, Any], tuple[str, ...]]] = [
        (plain, high, ("reasoning_effort",)),
        (plain, none, ()),
        (plain, variables, ("chat_template_kwargs",)),
        (plain, {}, ()),
        (switched, variables, ()),
    ]
    for codec, fields, ignored in cases:
        assert output_format.ignored_by_template(chat(**fields), codec.traits) == ignored
    assert prompt(plain, messages=TURNS[3:], **high) == prompt(plain, messages=TURNS[3:])
    with pytest.raises(RefusedError, match="leave 'reasoning_effort' out"):
        encode_prompts(dataclasses.replace(chat(**high), refuses_unknown=True), plain)


@pytest.mark.parametrize(
    ("choice", "used", "counted"), [("auto", "lfm2", "lfm2"), ("required", "plain", None)]
)
def test_a_strict_tool_of_a_format_without_a_grammar(
    choice: str, used: str, counted: str | None
) -> None:
    function = {"name": "f", "strict": True, "parameters": SCHEMA}
    request = chat(tools=[{"type": "function", "function": function}], tool_choice=choice)
    traits = TemplateTraits(answer_format=pythonic.LFM2)
    call_format = output_format.call_format_of(request, traits)
    assert call_format is not None
    assert call_format.name == used
    assert output_format.unenforced_format(request, traits) == counted


def test_a_name_stands_before_the_text_where_the_template_has_no_place_for_it(
    tmp_path: Path,
) -> None:
    assert prompt(codec_of(tmp_path, PLAIN), messages=TURNS) == (
        "user: Bob: hi\nassistant: researcher: hello\nuser: Ann: and I\nuser: nobody\n"
    )


def test_a_template_that_writes_names_gets_them(tmp_path: Path) -> None:
    assert prompt(codec_of(tmp_path, NAMED), messages=TURNS) == (
        "[Bob] user: hi\n[researcher] assistant: hello\n[Ann] user: and I\nuser: nobody\n"
    )


def test_the_name_of_a_result_may_be_sent_again(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "ping", "content": "pong"},
    ]
    codec = codec_of(tmp_path, NAMED)
    without = [turns[0], {name: value for name, value in turns[1].items() if name != "name"}]
    assert prompt(codec, messages=turns) == prompt(codec, messages=without)


def test_variables_reach_a_template_that_reads_them(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, SWITCHED)
    off = {"enable_thinking": False, "nobody_reads_this": [1, {"a": None}]}
    assert prompt(codec, chat_template_kwargs=off).endswith("no thinking")
    assert prompt(codec, chat_template_kwargs={"enable_thinking": True}) == "user: hi\n"


@pytest.mark.parametrize("name", ["name", "text", "cls", "codec", "variables", "_", "a b", ""])
def test_no_name_of_a_variable_breaks_the_engine(tmp_path: Path, name: str) -> None:
    template = PLAIN + "{# name text cls codec variables _ a b #}"
    assert prompt(codec_of(tmp_path, template), chat_template_kwargs={name: 1}) == "user: hi\n"


ENDED = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BEGUN: list[dict[str, Any]] = [
    {"role": "user", "content": "count"},
    {"role": "assistant", "content": "one two "},
]


def test_the_last_message_is_continued_without_its_end(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, ENDED)
    assert prompt(codec, messages=BEGUN) == "<user>count</><assistant>one two </><assistant>"
    assert prompt(codec, messages=BEGUN, add_generation_prompt=False) == (
        "<user>count</><assistant>one two </>"
    )
    continued = prompt(codec, messages=BEGUN, continue_final_message=True)
    assert continued == "<user>count</><assistant>one two "
    both = {"continue_final_message": True, "add_generation_prompt": False}  # as vLLM wants it
    assert prompt(codec, messages=BEGUN, **both) == continued


def test_a_template_that_drops_the_last_message_cannot_continue_it(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(RefusedError, match="chat template refuses these messages"):
        prompt(codec, messages=BEGUN, continue_final_message=True)


CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLED: list[dict[str, Any]] = [
    {"role": "assistant", "content": "so", "tool_calls": [CALL | {"id": "a"}, CALL | {"id": "b"}]},
    {"role": "tool", "tool_call_id": "a", "content": "x"},
    {"role": "tool", "tool_call_id": "b", "content": "y"},
]


@pytest.mark.parametrize(
    ("wanted", "written"),
    [
        ("{{ call.function.arguments.a }}", "assistant: so 1 1tool: x tool: y "),
        (
            "{{ 'text ' + call.function.arguments }}",
            'assistant: so text {"a": 1} text {"a": 1}tool: x',
        ),
        ("{{ raise_exception('one call only') }}", 'assistant: so\n<tool_call>\n{"name": "f"'),
    ],
)
def test_calls_of_the_history_are_written_in_a_form_that_the_template_takes(
    tmp_path: Path, wanted: str, written: str
) -> None:
    calls = "{% for call in message.tool_calls %} " + wanted + "{% endfor %}"
    body = "{{ message.role }}: {{ message.content }}{% if message.tool_calls %}" + calls
    template = "{# tools [TOOL_CALLS] #}{% for message in messages %}" + body
    template += "{% else %} {% endif %}\n{% endfor %}"
    assert prompt(codec_of(tmp_path, template), messages=CALLED).startswith(written)


def test_the_tokens_before_the_first_user_message_are_counted(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, PLAIN)
    system = {"role": "system", "content": "You answer in one word."}

    def count(*turns: dict[str, Any], counts_system: bool = True) -> int:
        task = PromptsTask(request=chat(messages=list(turns)), counts_system=counts_system)
        (prompt,) = prompt_encoder.run(task, codec, None)
        before, _ = decode_tokens(prompt.tokens, codec).split("Who", 1)
        counted = decode_tokens(prompt.tokens[: prompt.system_tokens], codec)
        assert counted == (before.rstrip() if counts_system else "")
        return prompt.system_tokens

    first = count(system, {"role": "user", "content": "Who asks?"})
    assert first > len("user:")
    again = count(system, {"role": "user", "content": "Who?"}, TURNS[1], TURNS[3])
    assert again == first
    assert count({"role": "user", "content": "Who?"}) == len("user:")
    assert not count(system, {"role": "user", "content": "Who asks?"}, counts_system=False)
