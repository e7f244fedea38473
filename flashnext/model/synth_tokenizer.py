"""A byte-level BPE of 265 tokens that round-trips any text, as GGUF keys."""

from __future__ import annotations

from typing import NamedTuple

from flashnext.model.gguf_format import ValueType
from flashnext.model.synth_shape import Metadata

_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5
# At least one merge: a loader wants the key, and an empty array cannot carry an element type.
_MERGES = ("t h", "th e", "i n", "e r")
# One token each, as in the real vocabulary: a test can make a random model call a tool by biasing the first.
_CALL_START, _CALL_STOP = "<tool_call>", "</tool_call>"
_END_OF_TEXT, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# ChatML with tools in the <tool_call> form; llama-server works it out from the template. No line feed follows
# the mark: the mark alone then starts the server's grammar, and a biased first token leads to a valid call.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more functions.\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call return a json object within <tool_call></tool_call> tags:\\n' }}
{{- '<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class Tokenizer(NamedTuple):
    """The vocabulary: token texts (GPT-2 byte letters), their GGUF types, and the ids that matter."""

    tokens: list[str]
    types: list[int]
    end_of_text: int
    end_of_turn: int
    tool_call: int
    printable: frozenset[int]  # ids whose text is printable ASCII or a line feed


def byte_letters() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 byte values."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    extra = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(extra)) for b in range(256)]


def tokenizer(size: int | None = None) -> Tokenizer:
    """The 265 tokens, padded with unused ones up to `size`."""
    tokens = [*byte_letters(), *(merge.replace(" ", "") for merge in _MERGES)]
    printable = frozenset([0x0A, *range(0x20, 0x7F), *range(256, len(tokens))])
    types = [_NORMAL] * len(tokens)
    tokens += [_CALL_START, _CALL_STOP, _END_OF_TEXT, _START, _END]
    types += [_USER] * 2 + [_CONTROL] * 3
    end_of_text, end_of_turn = len(tokens) - 3, len(tokens) - 1
    padding = max(0, (size or 0) - len(tokens))
    tokens += [f"[PAD{len(tokens) + i}]" for i in range(padding)]
    types += [_UNUSED] * padding
    return Tokenizer(tokens, types, end_of_text, end_of_turn, tokens.index(_CALL_START), printable)


def tokenizer_metadata(vocabulary: Tokenizer) -> Metadata:
    """The `tokenizer.*` keys."""
    array, string, u32 = ValueType.ARRAY, ValueType.STRING, ValueType.U32
    return {
        "tokenizer.ggml.model": (string, "gpt2"),
        "tokenizer.ggml.pre": (string, "qwen35"),
        "tokenizer.ggml.tokens": (array, (string, vocabulary.tokens)),
        "tokenizer.ggml.token_type": (array, (ValueType.I32, vocabulary.types)),
        "tokenizer.ggml.merges": (array, (string, list(_MERGES))),
        "tokenizer.ggml.eos_token_id": (u32, vocabulary.end_of_turn),
        "tokenizer.ggml.bos_token_id": (u32, vocabulary.end_of_text),
        "tokenizer.ggml.padding_token_id": (u32, vocabulary.end_of_text),
        "tokenizer.ggml.add_bos_token": (ValueType.BOOL, False),
        "tokenizer.chat_template": (string, CHAT_TEMPLATE),
    }
