"""Conversations: what of them is trained, how they are packed, and the files that `mjax prepare --chat` writes."""

import json
from itertools import chain

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import processors

from mjax.commands import cli
from mjax.config import save_config
from mjax.data.conversations import ConversationDataset, pack_best_fit
from mjax.data.corpus.documents import TextFiles, parse_block
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter, mask_file, token_file
from mjax.data.tokenizers import load_tokenizer
from mjax.errors import UsageError
from mjax.generation.chat import (
    PLAIN,
    TEMPLATE,
    Chat,
    ChatError,
    Trained,
    encode,
    find_trained_spans,
    read_messages,
)
from tests.small import small_config
from tests.test_chat import CHATML, bytes_with_special_tokens

MARKED = CHATML.replace(
    "{{ message['content'] }}<|im_end|>",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}",
)
LINES = MARKED.replace("{% endgeneration", "\n{% endgeneration")
STRIPPED = "{% set text %}" + CHATML + "{% endset %}{{ text | trim }}"
# As Qwen 3: reasoning of the last turn only, or an empty block instead.
THINKING = """{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' and loop.last -%}
<think>
{{ message.reasoning_content or '' }}
</think>

{% endif -%}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
MISTRAL = """{%- for message in messages -%}
{%- if message['role'] == 'user' -%}[INST] {{ message['content'] }}[/INST]
{%- elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}
{%- endif -%}
{%- endfor -%}"""
# As R1-Distill, Qwen 3 Thinking and Nemotron 3, whose generation prompts open the reasoning. The first never writes
# that of a finished turn, the second that of the last turn only, and the third an empty one instead.
OPENING = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
DISTILLED = OPENING.replace("message['content']", "message['content'].split('</think>')[-1]")
QWEN_THINKING = THINKING.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
NEMOTRON = OPENING.replace(
    "{{ message['content'] }}",
    "{% if message.role == 'assistant' %}{% if loop.last and message.thinking %}<think>\n"
    "{{ message.thinking }}\n</think>\n{% else %}<think></think>{% endif %}{% endif %}{{ message['content'] }}",
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello é."},
    {"role": "user", "content": "More"},
    {"role": "assistant", "content": "Yes.\nSure."},
]
UNWEIGHTED = [*TALK[:2], {**TALK[2], "weight": 0}, TALK[3], {**TALK[4], "weight": 1}]
THOUGHT = [TALK[1], {**TALK[2], "reasoning_content": "I greet."}]
INLINE = [TALK[1], {**TALK[2], "content": "<think>I greet.</think>Hello é."}]
QUOTED = [*THOUGHT, TALK[3], {"role": "assistant", "content": "I greet. Then more."}]
CHANNEL = CHATML.replace("{{ message['content'] }}", "{{ message.thinking or '' }}{{ message['content'] }}")


def chat_of(folder, template, special=(), settings=None):
    """A chat by single bytes and special tokens: ChatML's and others."""
    folder.mkdir(exist_ok=True)
    library = bytes_with_special_tokens()
    library.add_special_tokens(list(special))
    library.save(str(folder / "t.json"))
    load_tokenizer(f"hf:{folder / 't.json'}").save(folder)
    (folder / TEMPLATE).write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **(settings or {})}))
    return Chat(folder)


@pytest.mark.parametrize(
    ("template", "messages", "trained", "expected"),
    [
        (CHATML, TALK, Trained(), ["Hello é.<|im_end|>", "Yes.\nSure.<|im_end|>"]),
        (CHATML, TALK, Trained(turns="last"), ["Yes.\nSure.<|im_end|>"]),
        (MARKED, TALK, Trained(), ["Hello é.<|im_end|>", "Yes.\nSure.<|im_end|>"]),
        (LINES, TALK, Trained(turns="last"), ["Yes.\nSure.<|im_end|>\n"]),
        # Without the line break after its header, the model has to write it.
        (STRIPPED, TALK, Trained(), ["\nHello é.<|im_end|>", "\nYes.\nSure.<|im_end|>"]),
        (MISTRAL, TALK, Trained(), [" Hello é.<|im_end|>", " Yes.\nSure.<|im_end|>"]),
        (THINKING, TALK, Trained(), ["Hello é.<|im_end|>", "Yes.\nSure.<|im_end|>"]),
        (THINKING, THOUGHT, Trained(), ["<think>\nI greet.\n</think>\n\nHello é.<|im_end|>"]),
        (DISTILLED, TALK, Trained(), ["Hello é.<|im_end|>", "Yes.\nSure.<|im_end|>"]),
        (DISTILLED, INLINE, Trained(reasoning=False), ["Hello é.<|im_end|>"]),
        (QWEN_THINKING, TALK, Trained(), ["Hello é.<|im_end|>", "Yes.\nSure.<|im_end|>"]),
        (QWEN_THINKING, THOUGHT, Trained(), ["I greet.\n</think>\n\nHello é.<|im_end|>"]),
        (NEMOTRON, TALK, Trained(), ["Hello é.<|im_end|>", "Yes.\nSure.<|im_end|>"]),
        (NEMOTRON, THOUGHT, Trained(), ["I greet.\n</think>\nHello é.<|im_end|>"]),
        (NEMOTRON, THOUGHT, Trained(reasoning=False), ["Hello é.<|im_end|>"]),
        (CHATML, UNWEIGHTED, Trained(), ["Yes.\nSure.<|im_end|>"]),
        (MARKED, UNWEIGHTED, Trained(), ["Yes.\nSure.<|im_end|>"]),
        (CHANNEL, QUOTED, Trained(reasoning=False), ["Hello é.<|im_end|>", "I greet. Then more.<|im_end|>"]),
    ],
)
def test_assistant_and_its_end_of_turn_are_trained(template, messages, trained, expected, tmp_path):
    chat = chat_of(tmp_path / "t", template)
    text, spans = find_trained_spans(chat, messages, None, trained)
    assert [text[begin:end] for begin, end in spans] == expected
    encoded = encode(chat, {"messages": messages}, trained)
    marked = [token for token, mark in zip(encoded.ids, encoded.trained, strict=True) if mark]
    assert chat.decode(marked, special=True) == "".join(expected)
    assert encoded.stops == 258


def test_plain_template_trains_answer_and_end_of_document(tmp_path):
    """The tokenizer has no special tokens. The prompt alone has the ids that it has in the whole."""
    load_tokenizer("bytes").save(tmp_path)
    (tmp_path / TEMPLATE).write_text(PLAIN)
    chat = Chat(tmp_path)
    encoded = encode(chat, {"prompt": "Hi", "completion": "Yes"}, Trained())
    prompt = chat.encode(chat.render([TALK[1]]))
    assert chat.decode(encoded.ids, special=True) == "User: Hi\nAssistant: Yes<|endoftext|>\n"
    assert encoded.ids[: len(prompt)] == prompt
    assert [token for token, mark in zip(encoded.ids, encoded.trained, strict=True) if mark] == [*b" Yes", 256]


def test_token_of_header_and_answer_is_trained(tmp_path):
    """The space that ends a header may be a part of the first word."""
    template = PLAIN.replace("{% generation %} ", " {% generation %}")
    encoded = encode(chat := chat_of(tmp_path, template, [" Hi"]), {"prompt": "x", "completion": "Hi."}, Trained())
    marked = [token for token, mark in zip(encoded.ids, encoded.trained, strict=True) if mark]
    assert chat.decode(marked, special=True) == " Hi.<|im_end|>"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": TALK[:2]}, "it has no turn of the assistant"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "the role 'bot'; the roles are system,"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            'holds {"type": "image"}, which is not text',
        ),
        ({"text": "x"}, "or instruction and output, only text"),
        ({"messages": [{"role": "assistant", "content": ""}, TALK[1]], "tools": "["}, "tools is not JSON"),
        ({"messages": UNWEIGHTED[:3]}, "the weight of each turn to train is 0"),
        ({"messages": [TALK[1], {**TALK[2], "weight": 0.5}]}, "a message is 0.5; it is 0 (not trained) or 1"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "the role 'bot'"),
        ({"instruction": ["a"], "output": "b"}, "its instruction or input is not text"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "a history of earlier turns"),
        ({"messages": [*THOUGHT, *TALK[3:]]}, "renders message 2 differently if other messages follow"),
    ],
)
def test_unfit_conversation_is_named(fields, words, tmp_path):
    with pytest.raises(ChatError) as unfit:
        encode(chat_of(tmp_path / "t", THINKING), fields, Trained())
    assert words in str(unfit.value)


def test_reasoning_that_template_leaves_out_is_named(tmp_path):
    """And what the refusal says works."""
    chat = chat_of(tmp_path / "t", DISTILLED)
    with pytest.raises(ChatError, match=r"leaves out the reasoning of message 2, .* \(--no-reasoning\)"):
        encode(chat, {"messages": INLINE}, Trained())
    assert encode(chat, {"messages": INLINE}, Trained(reasoning=False))


def test_all_or_nothing_is_not_trained(tmp_path):
    everything = "{% generation %}{% for message in messages %}{{ message['content'] }}{% endfor %}{% endgeneration %}"
    nothing = "{% for message in messages %}{% if message['role'] == 'user' %}x{% endif %}{% endfor %}"
    for template, words in ((everything, "all of its tokens"), (nothing, "renders message 3 differently")):
        with pytest.raises(ChatError, match=words):
            encode(chat_of(tmp_path / "t", template), {"messages": TALK}, Trained())
    twice = MARKED.replace("<|im_end|>{% endg", "{% endgeneration %}{% generation %}<|im_end|>{% endg")
    with pytest.raises(ChatError, match="marks 4 parts of 2 turns of the assistant"):
        encode(chat_of(tmp_path / "t", twice), {"messages": UNWEIGHTED}, Trained())
    with pytest.raises(ChatError, match=r"message 5 differently without its header.*: --chat-template"):
        encode(chat_of(tmp_path / "t", nothing), {"messages": TALK}, Trained(turns="last"))


def test_parts_and_tools_are_read():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    fields = {"prompt": [{"role": "user", "content": parts}], "completion": "c", "tools": '[{"name": "f"}]'}
    expected = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert read_messages(fields) == (expected, [{"name": "f"}])


@pytest.mark.parametrize(
    "fields",
    [
        {"conversations": [{"from": "human", "value": "a\nb"}, {"from": "gpt", "value": "c", "weight": 1}]},
        {"conversations": [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c", "weight": 1}]},
        {"instruction": "a", "input": "b", "output": "c"},
        {"instruction": "a\nb", "input": "", "output": "c", "history": []},
    ],
)
def test_sharegpt_and_alpaca_are_read(fields):
    messages, _ = read_messages(fields | {"system": "s"})
    read = [(message["role"], message["content"]) for message in messages]
    assert read == [("system", "s"), ("user", "a\nb"), ("assistant", "c")]


# --- Packing ----------------------------------------------------------------------------------------------------------


def test_best_fit_takes_the_least_room_that_is_enough():
    sizes = np.array([7, 6, 4, 3, 3, 2, 1])
    assert pack_best_fit(sizes, 10).tolist() == [0, 1, 1, 0, 2, 2, 2]
    random = np.random.RandomState(0)
    sizes = np.sort(random.randint(1, 128, 5000))[::-1]
    chosen = pack_best_fit(sizes, 128)
    filled = np.bincount(chosen, sizes)
    assert filled.max() <= 128
    assert filled.sum() / (128 * len(filled)) > 0.98


def packed(folder, lengths, **options):
    """Conversations of these lengths, whose tokens are their number and position; their second half is trained."""
    with IndexedDatasetWriter(folder / "d", 60_000) as writer:
        for number, length in enumerate(lengths):
            tokens = 1000 * number + np.arange(length)
            writer.add_documents(tokens, np.array([length]), np.array([1]), np.arange(length) >= length // 2)
    defaults = {"documents": range(len(lengths)), "samples": None, "sequence": 16, "seed": 3}
    return ConversationDataset(IndexedDataset(folder / "d"), **defaults | options)


LENGTHS = [5, 17, 9, 9, 2, 3, 9, 4, 12, 7, 7, 16]


@pytest.mark.parametrize("pack", [True, False])
def test_every_epoch_has_each_conversation_once(pack, tmp_path):
    data = packed(tmp_path, LENGTHS, samples=100, pack=pack)
    epochs = [[data.conversation_ids(n * data.sequences + i).tolist() for i in range(data.sequences)] for n in range(3)]
    for epoch in epochs:
        assert sorted(chain.from_iterable(epoch)) == list(range(len(LENGTHS)))
    assert epochs[0] != epochs[1] != epochs[2]
    assert data.sequences == (6 if pack else len(LENGTHS))
    assert data.padding == pytest.approx(1 - (sum(LENGTHS) - len(LENGTHS)) / (data.sequences * 16))


def test_packed_sample_is_its_conversations_side_by_side(tmp_path):
    data = packed(tmp_path, LENGTHS)
    for index in range(len(data)):
        sample, begin = data[index], 0
        for number, conversation in enumerate(data.conversation_ids(index)):
            length = LENGTHS[conversation]
            part = {name: array[begin : begin + length - 1] for name, array in sample.items()}
            assert part["tokens"].tolist() == (1000 * conversation + np.arange(length - 1)).tolist()
            assert part["labels"].tolist() == (1000 * conversation + np.arange(1, length)).tolist()
            assert part["positions"].tolist() == list(range(length - 1))
            assert set(part["documents"]) == {number}
            assert part["loss_mask"].tolist() == (np.arange(1, length) >= length // 2).tolist()
            begin += length - 1
        assert not sample["loss_mask"][begin:].any()
        assert (sample["documents"][begin:] == number + 1).all()


def test_conversation_beyond_the_sequence_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"2 conversations of .* are longer than --model.sequence 12; raise it to 16"):
        packed(tmp_path, LENGTHS, sequence=12)


def test_mask_of_other_tokens_is_refused(tmp_path):
    data = packed(tmp_path, LENGTHS)
    before = data.indexed.digest
    mask = mask_file(data.indexed.prefix)
    content = mask.read_bytes()
    mask.write_bytes(bytes([1 - content[0]]) + content[1:])
    assert IndexedDataset(data.indexed.prefix).digest != before, "another mask is another dataset"
    mask.write_bytes(content[:-1])
    with pytest.raises(UsageError, match=r"d\.mask is 99 bytes and its index describes 100"):
        IndexedDataset(data.indexed.prefix)


# --- mjax prepare --chat ----------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """A run folder with a config and a tokenizer, and no weights."""
    folder = tmp_path / "run"
    folder.mkdir()
    save_config(small_config(vocabulary=259, sequence=64), folder / "config.json")
    chat_of(folder / "tokenizer", CHATML)
    return folder


def prepare(run, lines, *flags):
    file = run.parent / "talk.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = str(run.parent / "out")
    return cli.main(["prepare", str(file), "--chat", "--tokenizer", f"run:{run}", "--output", output, *flags])


def test_plain_template_begins_as_texts_do(run, tmp_path):
    library = bytes_with_special_tokens()
    library.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 257)])
    library.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(f"hf:{tmp_path / 't.json'}")
    tokenizer.bos = 257
    tokenizer.save(run / "tokenizer")
    assert prepare(run, [{"prompt": "a", "completion": "b"}], "--chat-template", "plain") == 0
    ids = IndexedDataset(tmp_path / "out").get(0)
    assert Chat(tmp_path / "out.tokenizer").decode(ids, special=True).startswith("<|im_start|>User: a\n")


def test_half_a_surrogate_pair_is_malformed(run, tmp_path, capsys):
    lines = [{"messages": [TALK[1], {**TALK[2], name: "a\ud83d"}]} for name in ("content", "role")]
    assert prepare(run, [*lines, {"messages": TALK[1:3]}], "--malformed", "skip") == 0
    examples = json.loads((tmp_path / "out.json").read_text())["malformed_examples"]
    assert ["an unpaired surrogate" in one for one in examples] == [True, False]
    for line in (lines[0], {"messages": ["a\ud83d"]}):
        assert prepare(run, [line], "--overwrite") == 2
        assert "a\\ud83d" in capsys.readouterr().err


def test_arguments_that_parquet_adds_are_left_out(tmp_path):
    """A column of structures has all fields that any row has; what a row lacks is null."""
    calls = [{"function": {"arguments": {name: [1, None]}}} for name in ("city", "days")]
    rows = [{"messages": [{"role": "assistant", "tool_calls": [call]}]} for call in calls]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    documents = [
        one for block in TextFiles((tmp_path / "a.parquet",), key="").blocks() for one in parse_block(block, "")[0]
    ]
    assert [document.fields for document in documents] == rows


def test_prepare_writes_tokens_masks_and_template(run, tmp_path, capsys):
    short = {"prompt": "a", "completion": "b"}
    assert prepare(run, [{"messages": TALK[1:3]}, {"messages": TALK}, short], "--preview", "1", "--workers", "1") == 0
    printed = capsys.readouterr().out
    assert "Hello é.<|im_end|>" in printed
    assert "dropped" in printed
    data = IndexedDataset(tmp_path / "out")
    chat = Chat(tmp_path / "out.tokenizer")
    assert len(data) == 2, "the long one has more than 65 tokens"
    assert chat.decode(data.get(1)[data.loss_mask(1)], special=True) == "b<|im_end|>"
    metadata = json.loads((tmp_path / "out.json").read_text())
    assert metadata["trained"] == int(data.loss_mask(0).sum() + data.loss_mask(1).sum())
    whole = token_file(data.prefix).read_bytes(), mask_file(data.prefix).read_bytes()
    lines = [{"messages": TALK[1:3]}, {"messages": TALK}, short]
    assert prepare(run, lines, "--overwrite", "--workers", "2") == 0
    assert (token_file(data.prefix).read_bytes(), mask_file(data.prefix).read_bytes()) == whole
    assert prepare(run, lines, "--overwrite", "--overflow", "truncate") == 0
    cut = IndexedDataset(tmp_path / "out")
    assert cut.lengths.max() == 65
    assert "cut" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "flags", "words"),
    [
        (
            [{"messages": TALK[:2]}],
            (),
            'talk.jsonl:1: it has no turn of the assistant ({"messages": [{"role": "system"',
        ),
        (
            [{"messages": TALK}],
            (),
            "all 1 conversations are longer than --max-length 65; raise it, or add --overflow truncate",
        ),
        ([{"messages": TALK}], ("--demo",), "--demo fetches its documents"),
        ([], ("--chat-template", "none.jinja"), "--chat-template none.jinja is not a file; give a file in Jinja"),
        ([], ("--split-sentences",), "--split-sentences is for text, and --chat for conversations"),
        ([], ("--tokenizer", "bytes"), "--chat needs the tokenizer and chat template of the model to train"),
    ],
)
def test_wrong_conversations_are_one_sentence(lines, flags, words, run, capsys):
    assert prepare(run, lines, *flags) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert len(printed.splitlines()) == 1


def test_run_without_template_needs_one(run, capsys):
    (run / "tokenizer" / TEMPLATE).unlink()
    assert prepare(run, [{"messages": TALK}]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_flags_of_chat_need_chat(tmp_path, capsys):
    assert cli.main(["prepare", "x.txt", "--output", str(tmp_path / "o"), "--train-on", "last"]) == 2
    assert "--train-on is for conversations; add --chat, or remove it" in capsys.readouterr().err


def test_token_beyond_the_embedding_is_named(run, capsys):
    file = run / "tokenizer" / "mjax_tokenizer.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"vocabulary": 258}))
    assert prepare(run, [{"messages": TALK[1:3]}]) == 2
    assert "the chat template writes <|im_end|>, id 258, and the model has 258 ids" in capsys.readouterr().err
