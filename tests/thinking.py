"""Tokenizers of models that think: templates with the semantics of Qwen3's and DeepSeek-R1's."""

import functools

import transformers
from tokenizers import AddedToken

from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.text.training import train_tokenizer
from tests.tiny import WORDS

# As in Qwen3: the block of an earlier assistant turn is dropped, and `enable_thinking=False` ends
# the prompt with an empty block.
SWITCHED = """{%- set ns = namespace(query=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content, thought = message.content, '' -%}
{%- if message.role == 'assistant' and '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and loop.index0 > ns.query -%}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}"""
# As in DeepSeek-R1's distilled models: every prompt ends within a block.
ALWAYS = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}"""


@functools.cache
def thinking_tokenizer(template: str) -> ChatTokenizer:
    """A byte-level tokenizer of 302 ids with `<think>` and `</think>`, no control tokens."""
    return ChatTokenizer(_tokenizer(template))


def _tokenizer(template: str) -> transformers.PreTrainedTokenizerFast:
    hf = train_tokenizer([WORDS] * 3, 300)
    hf.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    hf.chat_template = template
    return hf
