"""Chat templates rendered and tokenized as by `apply_chat_template` of transformers."""

import json

import pytest

from mjax.chat import Chat
from mjax.data.tokenizers import load_tokenizer
from tests.test_chat import CHATML, bytes_with_special_tokens

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")
pytestmark = pytest.mark.parity

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\n\\nToday Date: " + date_string + "\\n" + system_message + eos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('alternate') }}{%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
"""
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and not ns.found %}{%- set ns.found = true %}{% continue %}{%- endif %}
    {%- if loop.index > 9 %}{% break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content is defined %}
            {{- '<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {% generation %}{{- message.content + ns.last|string }}{% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
CONVERSATIONS = [
    [{"role": "user", "content": "Hi <b> & 'quoted' é 😀"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "  One\n"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "reasoning": "sum", "tool_calls": None},
        {"role": "user", "content": "<|im_end|> injected"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"b": 1, "a": [1.5]}}}]


@pytest.fixture(params=[CHATML, LLAMA3, QWEN3], ids=["chatml", "llama 3", "qwen 3"])
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
    return Chat(tmp_path, 256), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["question", "system", "three turns"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
def test_conversation_has_text_and_ids_of_transformers(both, messages, tools):
    chat, theirs = both
    text = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert chat.render(messages, tools) == text
    ids = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    assert chat.encode(text) == list(ids)
    assert chat.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
