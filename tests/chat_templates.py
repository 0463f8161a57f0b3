"""Chat templates with the habits of model families, written by hand and short: what rendering has to survive."""

from __future__ import annotations

from tests.tiny_chat import CHATML

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
"""Trims every turn; a header of two control tokens."""

MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(system='') %}"
    "{% if messages[0].role == 'system' %}{% set ns.system = messages[0].content + '\\n\\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (ns.system if loop.index0 >= messages | length - 2 + messages | length % 2 else '') }}"
    "{{ m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
"""No generation prompt; a space before the answer; the system message moves to the last user turn."""

QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% if tools %}{{ '<|im_start|>system\\nTools:' }}{% for t in tools %}{{ '\\n' + t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role != 'assistant' %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% else %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{% set thought = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') "
    "if '</think>' in m.content else '') %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ content }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + c.function.name + c.function.arguments | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Drops the reasoning of earlier turns and puts an empty think block into the last."""

DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<User>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<out>' + m.content + '</out>' }}"
    "{% elif m.content is none %}{{ '<Assistant>' }}{% for c in m.tool_calls %}"
    "{{ '<call>' + c.function.name + ' ' + c.function.arguments + '</call>' }}{% endfor %}"
    "{% else %}{{ ('' if loop.index0 and messages[loop.index0 - 1].role == 'tool' else '<Assistant>') }}"
    "{{ m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<Assistant>' }}{% endif %}"
)
"""A call has no content (none), its arguments are text, and no end of turn follows it."""

HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}"
    "{% if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{% elif loop.last %}"
    "{% if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""The model writes the channel itself; a turn ends with another token when it is history."""

CONTROL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|eot_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "[INST]",
    "[/INST]",
)  # fmt: skip
ENDS = {
    "chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "qwen3": "<|im_end|>", "deepseek": "</s>",
    "harmony": "<|return|>",
}  # fmt: skip
FAMILIES = {
    "chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen3": QWEN3, "deepseek": DEEPSEEK, "harmony": HARMONY,
}  # fmt: skip
