"""`mjax generate --chat`: templates in their sandbox, conversations from stdin, and the command."""

import io
import json
import shutil
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.commands import cli
from mjax.config import save_config
from mjax.data.tokenizers import load_tokenizer, stop_token_ids
from mjax.errors import UsageError
from mjax.generation.chat import Chat, read_conversations
from mjax.models.build import build_model
from tests.small import small_config

CHATML = """{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER = [{"role": "user", "content": "Hi"}]


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


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def test_special_tokens_are_single_ids_that_end_answers(run):
    chat = Chat(run / "tokenizer")
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
        "{% for %}",
    ],
)
def test_template_that_fails_or_escapes_is_rejected(template, copied):
    (copied / "tokenizer" / "chat_template.jinja").write_text(template)
    with pytest.raises(UsageError, match=r"chat_template\.jinja rejects the conversation or is damaged"):
        Chat(copied / "tokenizer").render(USER)


@pytest.mark.parametrize("token", [{"lstrip": True}, 3, ["<|im_end|>"]])
def test_wrong_special_token_is_rejected(token, copied):
    (copied / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    with pytest.raises(UsageError, match=r"tokenizer_config\.json: eos_token is .*, not a token; restore the file"):
        Chat(copied / "tokenizer")


def test_conversations_are_one_value_or_one_a_line():
    tools = [{"name": "f"}]
    assert read_conversations(json.dumps(USER, indent=2)) == [(USER, None)]
    lines = "\n".join([json.dumps(USER), "", json.dumps({"messages": USER, "tools": tools})])
    assert read_conversations(lines) == [(USER, None), (USER, tools)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"role": "user"}]\n[', "line 2 of stdin is not JSON"),
        ("{}", "stdin has JSON that is not a conversation: it has no messages, prompt and completion"),
        ('[{"content": "x"}]', "is not a conversation"),
        ('{"messages": [{"role": "user"}], "tools": 3}', "is not a conversation"),
    ],
)
def test_other_json_is_rejected(text, words):
    with pytest.raises(UsageError) as rejected:
        read_conversations(text)
    assert words in str(rejected.value)


FIRST = "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\n"
ALONE = FIRST.replace("One", "Two")


@pytest.mark.parametrize(
    ("flags", "stdin", "rendered"),
    [
        ((), "One\n\nTwo\n", [[FIRST], [f"{FIRST}Yes.<|im_end|>\n{ALONE.partition('<|im_end|>')[2][1:]}"]]),
        (("--num-samples", "2"), '[{"role": "user", "content": "One"}]', [[FIRST]]),
        (("--prompt", "-"), "One\nTwo\n", [[FIRST, ALONE]]),
    ],
    ids=["turns of one conversation", "JSON", "prompts"],
)
def test_stdin_holds_turns_or_conversations(flags, stdin, rendered, run, monkeypatch):
    """Each conversation begins with the system message, and continues with the answers."""
    written = []

    def write(self, texts, *_):
        written.append(texts)
        return [SimpleNamespace(continuation="Yes.") for _ in texts]

    monkeypatch.setattr("mjax.commands.generate.Writer.write", write)
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert cli.main(["generate", "--run", str(run), "--chat", "--system", "Be.", *flags]) == 0
    assert written == rendered


@pytest.mark.parametrize(
    ("flags", "stdin", "words"),
    [
        (("--chat",), "", "there is no question; add --prompt TEXT"),
        (("--chat", "--num-samples", "2"), "Hi", "--num-samples 2 gives a conversation several answers"),
        (("--system", "x", "--prompt", "x"), "", "--system is for a conversation; add --chat"),
    ],
)
def test_impossible_chat_is_rejected(flags, stdin, words, run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert cli.main(["generate", "--run", str(run), *flags]) == 2
    assert words in capsys.readouterr().err


def test_run_without_template_is_named(copied, capsys):
    (copied / "tokenizer" / "chat_template.jinja").unlink()
    assert cli.main(["generate", "--run", str(copied), "--chat", "--prompt", "x"]) == 2
    assert f"{copied}/tokenizer has no chat template; remove it, put" in capsys.readouterr().err


def test_ids_of_given_tokenizer_end_texts(run):
    assert stop_token_ids(run / "tokenizer", 5) == [5, 257]
    assert stop_token_ids(run / "tokenizer", 5, "bytes") == [5]
