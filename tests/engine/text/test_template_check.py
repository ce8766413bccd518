"""Chat templates of real models pass the check; errors for one message are no fault of a template."""

import pytest

from engine.text import template_check

CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + eos_token }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{{ bos_token }}{% generation %}{{ messages[0]['content'] }}{% endgeneration %}",
        "{{ strftime_now('%Y') }}{{ tools | tojson(indent=2) }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'][7].nothing.at_all }}",
        "{{ messages[1].content + 1 }}{{ 1 // 0 }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ unknown(1) }}",
    ],
)
def test_templates_that_render_or_refuse_are_accepted(template: str) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert template_check.render_complaint(template, tokens) == ""


def test_the_child_checks_every_template() -> None:
    assert template_check.find_complaint([CHATML, CHATML], {"eos_token": "é"}) == ""
    complaint = template_check.find_complaint([CHATML, "{% for %}"], {})
    assert complaint.startswith("it cannot be parsed: ")


def test_a_template_larger_than_a_pipe_is_checked() -> None:
    large = "{# " + "x" * 300_000 + " #}"
    assert template_check.find_complaint([large + CHATML], {}) == ""
    assert template_check.find_complaint([large + "{% for %}"], {}) != ""
