"""Chat templates by the names that mergekit gives them, written from what the formats are.

Where mergekit's own have white space that the formats have not (a line end after each turn of
llama3, indented turns of exaone), models have not seen it in training, so it is not here.
"""

from typing import Final

TEMPLATES: Final = {
    # Without system messages but for the last, which comes first.
    "alpaca": (
        "{% set titles = {'user': 'Instruction', 'user_context': 'Input', 'assistant': 'Response'}"
        " %}{% for message in messages if message.role == 'system' %}"
        "{% if loop.last %}{{ message.content | trim }}{{ '\n\n' }}{% endif %}{% endfor %}"
        "{% for message in messages %}{% if message.role in titles %}"
        "### {{ titles[message.role] }}:\n"
        "{{ message.content | trim }}{{ '' if loop.last else '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'assistant' %}"
        "{{ '\n\n' }}### Response:\n{% endif %}"
    ),
    "chatml": (
        "{% for message in messages %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # A conversation without a system message begins with an empty one.
    "exaone": (
        "{% for message in messages %}"
        "{{ '[|system|][|endofturn|]\n' if loop.first and message.role != 'system' }}"
        "[|{{ message.role }}|]{{ message.content }}"
        "{{ '\n' if message.role == 'user' else '[|endofturn|]\n' }}{% endfor %}"
        "{% if add_generation_prompt %}[|assistant|]{% endif %}"
    ),
    "llama3": (
        "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
        "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{ message.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    # The system message is a part of the first question; the question itself asks to speak.
    "mistral": (
        "{% set asked = 1 if messages[0].role == 'system' else 0 %}{{ bos_token }}"
        "{% for message in messages[asked:] %}"
        "{% if message.role != ['user', 'assistant'][loop.index0 % 2] %}"
        "{{ raise_exception('users and assistants must take turns, a user first') }}{% endif %}"
        "{% if message.role == 'user' %} [INST] "
        "{{ messages[0].content ~ '\n\n' if asked and loop.first else '' }}"
        "{{ message.content }} [/INST]"
        "{% else %} {{ message.content ~ eos_token }}{% endif %}{% endfor %}"
    ),
}
