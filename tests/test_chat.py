"""`mjax generate --chat`: templates in their sandbox, conversations from stdin, and the command."""

import io
import json

import jax.numpy as jnp
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from mjax import cli
from mjax.chat import Chat, read_conversations
from mjax.config import save_config
from mjax.data.tokenizers import load_tokenizer
from mjax.errors import UsageError
from mjax.inference import ends_of_text
from mjax.models.build import build_model
from mjax.state.checkpoint import Checkpoints
from tests.small import small_config

CHATML = """{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def bytes_with_special_tokens():
    """A tokenizer.json of single bytes and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(ENDS))
    return library


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of an untrained model with a chat template."""
    folder = tmp_path_factory.mktemp("runs") / "chat"
    config = small_config(vocabulary=259, vocabulary_multiple=64, sequence=128, attention="auto")
    with Checkpoints(folder / "checkpoints", on_notice=lambda line: None) as checkpoints:
        checkpoints.save(10, {"model": build_model(5, config.model), "step": jnp.int32(10)})
    save_config(config, folder / "config.json")
    bytes_with_special_tokens().save(str(folder / "t.json"))
    load_tokenizer(f"hf:{folder / 't.json'}").save(folder / "tokenizer")
    (folder / "t.json").unlink()
    (folder / "tokenizer" / "chat_template.jinja").write_text(CHATML)
    settings = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": [257]}')
    return folder


def chat_with(run, template):
    (run / "tokenizer" / "chat_template.jinja").write_text(template)
    try:
        return Chat(run, 256)
    finally:
        (run / "tokenizer" / "chat_template.jinja").write_text(CHATML)


def test_special_tokens_of_a_template_are_single_ids_and_end_an_answer(run):
    chat = Chat(run, 256)
    text = chat.render([{"role": "user", "content": "Hi é", "name": None}])
    assert text == "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n"
    ids = chat.encode(text)
    assert (ids[0], ids.count(257), ids.count(258)) == (257, 2, 1)
    assert len(ids) == 3 + len("user\nHi é\nassistant\n".encode())  # and a newline after the end of the turn
    assert chat.decode(ids) == "user\nHi é\nassistant\n"
    assert chat.stops == [256, 257, 258]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(__init__=1) %}{{ n }}",
        "{{ missing.name.other }}",
        "{% for %}",
    ],
)
def test_a_template_that_fails_or_reaches_out_gets_one_sentence(template, run):
    with pytest.raises(UsageError, match=r"chat_template\.jinja refuses the conversation or is damaged"):
        chat_with(run, template).render([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("token", [{"lstrip": True}, 3, ["<|im_end|>"]])
def test_a_special_token_that_is_none_gets_one_sentence(token, run):
    file = run / "tokenizer" / "tokenizer_config.json"
    kept = file.read_text()
    file.write_text(json.dumps({"eos_token": token}))
    try:
        with pytest.raises(UsageError, match=r"tokenizer_config\.json: eos_token is .*, not a token; restore the file"):
            Chat(run, 256)
    finally:
        file.write_text(kept)


def test_conversations_are_one_json_value_or_one_a_line():
    user = [{"role": "user", "content": "Hi"}]
    tools = [{"name": "f"}]
    assert read_conversations(json.dumps(user, indent=2)) == [(user, None)]
    lines = "\n".join([json.dumps(user), "", json.dumps({"messages": user, "tools": tools})])
    assert read_conversations(lines) == [(user, None), (user, tools)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1", "line 1 of stdin is not JSON"),
        ('[{"role": "user"}]\n[', "line 2 of stdin is not JSON"),
        ("{}", 'stdin has JSON that is not a conversation; write [{"role": "user"'),
        ("[]", "is not a conversation"),
        ('[{"content": "x"}]', "is not a conversation"),
        ('{"messages": [{"role": "user"}], "tools": 3}', "is not a conversation"),
    ],
)
def test_other_json_gets_one_sentence(text, words):
    with pytest.raises(UsageError) as refused:
        read_conversations(text)
    assert words in str(refused.value)


def test_lines_of_stdin_are_the_turns_of_one_conversation(run, capsys, monkeypatch):
    argv = ["generate", "--run", str(run), "--chat", "--json", "--temperature", "0", "--tokens", "4", "--system", "Be."]
    monkeypatch.setattr("sys.stdin", io.StringIO("One\n\nTwo\n"))
    assert cli.main(argv) == 0
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["prompt"].startswith("<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nOne<|im_end|>")
    answered = f"{first['prompt']}{first['continuation']}<|im_end|>\n<|im_start|>user\nTwo<|im_end|>"
    assert second["prompt"].startswith(answered)

    monkeypatch.setattr("sys.stdin", io.StringIO('[{"role": "user", "content": "One"}]'))
    assert cli.main([*argv[:-2], "--num-samples", "1"]) == 0
    assert "user\nOne<|im_end|>" in json.loads(capsys.readouterr().out)["prompt"]

    monkeypatch.setattr("sys.stdin", io.StringIO("One\nTwo\n"))
    assert cli.main([*argv, "--prompt", "-"]) == 0
    alone = [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()]
    assert ["One" in prompt for prompt in alone] == [True, False]
    assert "user\nTwo<|im_end|>" in alone[1]

    assert (
        cli.main(["generate", "--run", str(run), "--chat", "--prompt", "One", "--temperature", "0", "--tokens", "4"])
        == 0
    )
    plain = capsys.readouterr().out
    assert "<|im_start|>" not in plain
    assert plain.endswith("\n")


@pytest.mark.parametrize(
    ("flags", "stdin", "words"),
    [
        (("--chat",), "", "there is no question; add --prompt TEXT"),
        (("--chat",), "[1,", "line 1 of stdin is not JSON"),
        (("--chat", "--num-samples", "2"), "Hi", "--num-samples 2 would give a conversation several answers"),
        (("--system", "x", "--prompt", "x"), "", "--system is for a conversation; add --chat"),
    ],
)
def test_a_chat_that_cannot_be_is_refused(flags, stdin, words, run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert cli.main(["generate", "--run", str(run), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_a_template_says_where_to_put_one(run, capsys, monkeypatch):
    template = run / "tokenizer" / "chat_template.jinja"
    template.rename(run / "away")
    try:
        assert cli.main(["generate", "--run", str(run), "--chat", "--prompt", "x"]) == 2
    finally:
        (run / "away").rename(template)
    assert (
        f"{run} has no chat template; leave it out, or put the model's chat_template.jinja" in capsys.readouterr().err
    )


def test_a_text_ends_where_the_model_says_but_not_by_the_ids_of_another_tokenizer(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert ends_of_text(tmp_path, 5) == [5, 7, 9]
    assert ends_of_text(tmp_path, 5, "bytes") == [5]
