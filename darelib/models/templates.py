"""Chat templates by the names that mergekit gives them, written from what the formats are.

Where mergekit's own have white space that the formats have not (a line end after each turn of
llama3, indented turns of exaone), models have not seen it in training, so it is not here.
"""

from typing import Final


def _make(turn: str, opening: str, condition: str = "add_generation_prompt") -> str:
    """A template with this text for each message, and this one to let the model speak."""
    turns = "{% for message in messages %}" + turn + "{% endfor %}"
    return turns + "{% if " + condition + " %}" + opening + "{% endif %}"


def _make_llama3() -> str:
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    start = "{% if loop.first %}{{ bos_token }}{% endif %}"
    turn = header.format("{{ message.role }}") + "{{ message.content | trim }}<|eot_id|>"
    return _make(start + turn, header.format("assistant"))


def _make_alpaca() -> str:
    """Without system messages but for the last, which comes first."""
    system = (
        "{% for message in messages if message.role == 'system' %}"
        "{% if loop.last %}{{ message.content | trim }}{{ '\n\n' }}{% endif %}{% endfor %}"
    )
    titles = "{'user': 'Instruction', 'user_context': 'Input', 'assistant': 'Response'}"
    turn = (
        "{% if message.role in titles %}### {{ titles[message.role] }}:\n"
        "{{ message.content | trim }}{{ '' if loop.last else '\n\n' }}{% endif %}"
    )
    asked = "add_generation_prompt and messages[-1].role != 'assistant'"
    turns = _make(turn, "{{ '\n\n' }}### Response:\n", asked)
    return "{% set titles = " + titles + " %}" + system + turns


def _make_mistral() -> str:
    """The system message is a part of the first question; the question itself asks to speak."""
    wanted = "['user', 'assistant'][loop.index0 % 2]"
    complaint = "raise_exception('users and assistants must take turns, a user first')"
    return (
        "{% set asked = 1 if messages[0].role == 'system' else 0 %}{{ bos_token }}"
        "{% for message in messages[asked:] %}"
        "{% if message.role != " + wanted + " %}{{ " + complaint + " }}{% endif %}"
        "{% if message.role == 'user' %} [INST] "
        "{{ messages[0].content ~ '\n\n' if asked and loop.first else '' }}"
        "{{ message.content }} [/INST]"
        "{% else %} {{ message.content ~ eos_token }}{% endif %}{% endfor %}"
    )


def _make_exaone() -> str:
    """A conversation without a system message begins with an empty one."""
    empty = "{{ '[|system|][|endofturn|]\n' if loop.first and message.role != 'system' }}"
    turn = (
        "[|{{ message.role }}|]{{ message.content }}"
        "{{ '\n' if message.role == 'user' else '[|endofturn|]\n' }}"
    )
    return _make(empty + turn, "[|assistant|]")


TEMPLATES: Final = {
    "alpaca": _make_alpaca(),
    "chatml": _make(
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
    "exaone": _make_exaone(),
    "llama3": _make_llama3(),
    "mistral": _make_mistral(),
}
