"""Results of tool calls for templates that know none."""

from engine.text import template_traits


def test_images_of_results_stay_in_their_places() -> None:
    shown = {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}
    (turn,) = template_traits.spell_tool_calls([{"role": "tool", "content": "x"}, shown])
    opening, end = "<tool_response>\n", "\n</tool_response>"
    texts = [part.get("text", "<image>") for part in turn["content"]]
    assert "".join(texts) == f"{opening}x{end}\n{opening}a<image>{end}"
    (plain,) = template_traits.spell_tool_calls([{"role": "tool", "content": "x"}])
    assert plain == {"role": "user", "content": f"{opening}x{end}"}
