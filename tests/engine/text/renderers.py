"""Tool calls as the chat templates of model families write them."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Call: TypeAlias = tuple[str, dict[str, Any]]
Renderer: TypeAlias = Callable[[Sequence[Call]], str]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def hermes(calls: Sequence[Call], tag: str = "tool_call") -> str:
    return "\n".join(
        f'<{tag}>\n{{"name": "{name}", "arguments": {_json(given)}}}\n</{tag}>'
        for name, given in calls
    )


def longcat(calls: Sequence[Call]) -> str:
    return hermes(calls, "longcat_tool_call")


def qwen_coder(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        given = "".join(
            f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in call[1].items()
        )
        return f"<tool_call>\n<function={call[0]}>\n{given}</function>\n</tool_call>"

    return "\n".join(map(one, calls))


def seed(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        # The template writes `value | string`, so containers are Python's.
        given = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in call[1].items())
        return f"<seed:tool_call>\n<function={call[0]}>\n{given}</function>\n</seed:tool_call>"

    return "\n".join(map(one, calls))


def glm(calls: Sequence[Call], newline: str = "\n") -> str:
    def one(call: Call) -> str:
        given = "".join(
            f"<arg_key>{key}</arg_key>{newline}<arg_value>{_text(value)}</arg_value>{newline}"
            for key, value in call[1].items()
        )
        return f"<tool_call>{call[0]}{newline}{given}</tool_call>"

    return "\n".join(map(one, calls))


def glm47(calls: Sequence[Call]) -> str:
    return glm(calls, "")


def minimax(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        given = "".join(
            f'<parameter name="{key}">{_text(value)}</parameter>\n'
            for key, value in call[1].items()
        )
        return f'<invoke name="{call[0]}">\n{given}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(map(one, calls))}</minimax:tool_call>"


def kimi(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{_json(given)}<|tool_call_end|>"
        for at, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def deepseek(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(given)}<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_v3(calls: Sequence[Call]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_v32(calls: Sequence[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        is_text = str(isinstance(value, str)).lower()
        return f'<｜DSML｜parameter name="{key}" string="{is_text}">{_text(value)}</｜DSML｜parameter>\n'

    written = "".join(
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(argument(key, value) for key, value in given.items())
        + "</｜DSML｜invoke>\n"
        for name, given in calls
    )
    return f"<｜DSML｜function_calls>\n{written}</｜DSML｜function_calls>"


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}<|call|>"
        for name, given in calls
    )


def mistral(calls: Sequence[Call]) -> str:
    listed = [
        {"name": name, "arguments": given, "id": f"call0000{at}"}
        for at, (name, given) in enumerate(calls)
    ]
    return f"[TOOL_CALLS] {_json(listed)}"


def mistral_v11(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in calls)


def mistral_call_id(calls: Sequence[Call]) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]call0000{at}[ARGS]{_json(given)}"
        for at, (name, given) in enumerate(calls)
    )


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {_json(given)}}}' for name, given in calls)


def python(calls: Sequence[Call]) -> str:
    listed = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in calls
    ]
    return f"[{', '.join(listed)}]"


def lfm2(calls: Sequence[Call]) -> str:
    return f"<|tool_call_start|>{python(calls)}<|tool_call_end|>"


def gemma4(calls: Sequence[Call], start: str = "<|tool_call>", end: str = "<tool_call|>") -> str:
    def argument(value: Any) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{argument(part)}" for key, part in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(argument, value)) + "]"
        return _json(value)

    return "".join(f"{start}call:{name}{argument(given)}{end}" for name, given in calls)


def function_gemma(calls: Sequence[Call]) -> str:
    written = gemma4(calls, "<start_function_call>", "<end_function_call>")
    return written.replace('<|"|>', "<escape>")


def minicpm(calls: Sequence[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        text = _text(value)
        has_markup = any(mark in text for mark in "<&\n")
        return f'<param name="{key}">{f"<![CDATA[{text}]]>" if has_markup else text}</param>'

    return "\n".join(
        f'<function name="{name}">{"".join(argument(*part) for part in given.items())}</function>'
        for name, given in calls
    )


def muse(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        given = "".join(
            f'<atem:parameter name="{key}">{_text(value)}</atem:parameter>\n'
            for key, value in call[1].items()
        )
        written = f'<atem:invoke name="{call[0]}">\n{given}</atem:invoke>\n'
        return f" to={call[0]}<|message|><atem:function_calls>\n{written}</atem:function_calls>"

    return "<|eom|><|start|>assistant".join(map(one, calls))


_K3_TYPES = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}


def kimi_k3(calls: Sequence[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        kind = _K3_TYPES.get(type(value), "number")
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{_text(value)}<|close|>argument<|sep|>'

    return _k3(
        [(name, "".join(argument(*part) for part in given.items())) for name, given in calls]
    )


def kimi_k3_whole(calls: Sequence[Call]) -> str:
    return _k3(
        [
            (name, f'<|open|>json type="object"<|sep|>{_json(given)}<|close|>json<|sep|>')
            for name, given in calls
        ]
    )


def _k3(calls: Sequence[tuple[str, str]]) -> str:
    written = "".join(
        f'<|open|>call tool="{name}" index="{at}"<|sep|>{body}<|close|>call<|sep|>'
        for at, (name, body) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{written}<|close|>tools<|sep|><|close|>message<|sep|>"


RENDERERS: dict[str, tuple[Renderer, ...]] = {
    "harmony": (harmony,),
    "kimi_k3": (kimi_k3, kimi_k3_whole),
    "muse": (muse,),
    "minimax": (minimax,),
    "seed": (seed,),
    "gemma4": (gemma4,),
    "function_gemma": (function_gemma,),
    "longcat": (longcat,),
    "glm": (glm, glm47),
    "qwen_coder": (qwen_coder,),
    "kimi": (kimi,),
    "minicpm": (minicpm,),
    "deepseek_v32": (deepseek_v32,),
    "deepseek_v3": (deepseek_v3,),
    "deepseek": (deepseek,),
    "mistral_call_id": (mistral_call_id,),
    "mistral_v11": (mistral_v11,),
    "mistral": (mistral,),
    "llama": (llama,),
    "lfm2": (lfm2,),
    "llama_pythonic": (python,),
    "hermes": (hermes,),
    "plain": (hermes,),
}
"""By the name of the format."""
