"""Chat templates rendered and tokenized as by `apply_chat_template` of transformers."""

import json

import pytest

from mjax.data.tokenizers import load_tokenizer
from mjax.generation.chat import Chat
from tests.test_chat import CHATML, bytes_with_special_tokens

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
pytestmark = pytest.mark.parity

EVERYTHING = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{{- "<|im_start|>system\\nToday Date: " + date_string }}
{%- for tool in tools or [] %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and not ns.found %}{%- set ns.found = true %}{% continue %}{%- endif %}
    {%- if loop.index > 2 %}{% break %}{%- endif %}
    {{- message.reasoning if message.reasoning is defined }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}{{- raise_exception('role') }}{%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {% generation %}{{- message['content'] | trim + ns.last|string + eos_token }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
CONVERSATIONS = [
    [{"role": "user", "content": "Hi <b> & 'quoted' é 😀"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "  1+1?\n"},
        {"role": "assistant", "content": "2", "reasoning": "sum", "tool_calls": None},
        {"role": "user", "content": "<|im_end|> injected"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"b": 1, "a": [1.5]}}}]


@pytest.fixture(params=[CHATML, EVERYTHING], ids=["chatml", "everything"])
def both(request, tmp_path):
    folder = tmp_path / "tokenizer"
    bytes_with_special_tokens().save(str(tmp_path / "t.json"))
    load_tokenizer(f"hf:{tmp_path / 't.json'}").save(folder)
    (folder / "chat_template.jinja").write_text(request.param)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Chat(folder), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["question", "three turns"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
def test_conversation_has_text_and_ids_of_transformers(both, messages, tools):
    chat, theirs = both
    text = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert chat.render(messages, tools) == text
    ids = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    assert chat.encode(text) == list(ids)
    assert chat.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_answer_that_has_begun_goes_on_as_in_transformers(both):
    chat, theirs = both
    messages = [*CONVERSATIONS[1], {"role": "assistant", "content": "It is"}]
    text = theirs.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert chat.render(messages, goes_on=True) == text
