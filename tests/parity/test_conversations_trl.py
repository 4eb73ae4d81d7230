"""Trained parts of conversations in the published chat templates that come with trl, by hand and by its marks."""

from importlib.metadata import distribution

import pytest

from mjax.generation.chat import ChatError, Trained, encode, find_trained_spans
from tests.data.test_conversations import chat_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
trl = pytest.importorskip("trl", reason="trl is not installed: make test-ci")

pytestmark = pytest.mark.parity

ONE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
TWO = [*ONE, {"role": "user", "content": "More"}, {"role": "assistant", "content": "Yes.\nSure."}]
THINK = [ONE[0], {**ONE[1], "reasoning_content": "I greet."}]
ENDS = {
    "llama3_1": "<|eot_id|>", "qwen2_5": "<|im_end|>", "gemma": "<end_of_turn>", "phi3": "<|end|>",
    "cohere": "<|END_OF_TURN_TOKEN|>", "qwen3_instruct_2507": "<|im_end|>", "qwen3": "<|im_end|>",
}  # fmt: skip


def template(name):
    return distribution("trl").locate_file(f"trl/chat_templates/{name}.jinja").read_text()


def chat_with(folder, name, end):
    """A chat of a published template, whose tokenizer has single bytes and the end of turn."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>"}
    return chat_of(folder, template(name), [end, "<|return|>", "<|start|>", "<|channel|>"], settings)


def trained_text(chat, messages, trained):
    text, spans = find_trained_spans(chat, messages, None, trained)
    return [text[begin:end] for begin, end in spans]


@pytest.mark.parametrize(("name", "end"), ENDS.items())
def test_turns_are_those_by_hand(name, end, tmp_path):
    chat = chat_with(tmp_path / "t", name, end)
    last = f"Yes.\nSure.{end}" if name != "phi3" else f"Yes.\nSure.{end}\n<|im_end|>"  # and the end of text, once
    assert trained_text(chat, TWO, Trained()) == [f"Hello there.{end}", last]
    assert trained_text(chat, TWO, Trained(turns="last")) == [last]


@pytest.mark.parametrize(
    ("name", "reasoning", "expected"),
    [
        ("qwen3", True, "<think>\nI greet.\n</think>\n\nHello there.<|im_end|>"),
        ("qwen3", False, "Hello there.<|im_end|>"),
        ("gptoss", True, "<|channel|>analysis<|message|>I greet.<|end|><|start|>assistant<|channel|>final<|message|>"
         "Hello there.<|return|>"),
        ("gptoss", False, "Hello there.<|return|>"),
    ],
)  # fmt: skip
def test_reasoning_is_trained_or_not(name, reasoning, expected, tmp_path):
    chat = chat_with(tmp_path / "t", name, "<|im_end|>")
    assert trained_text(chat, THINK, Trained(reasoning=reasoning)) == [expected]
    with pytest.raises(ChatError, match="--train-on last"):  # earlier turns lose their reasoning
        trained_text(chat, [*THINK, TWO[2], {**TWO[3], "reasoning_content": "Once more."}], Trained())


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "gemma", "qwen3_instruct_2507", "phi3"])
def test_ids_and_masks_equal_transformers(name, tmp_path):
    """Prefixes of the published template here; {% generation %} of the template that trl trains with there, which also
    counts the line break after a turn."""
    folder = tmp_path / "t"
    chat = chat_with(folder, name, ENDS.get(name, "<|eot_id|>"))
    ours = encode(chat, {"messages": TWO}, Trained())
    theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        TWO, chat_template=template(f"{name}_training"), return_dict=True, return_assistant_tokens_mask=True
    )
    assert ours.ids == theirs["input_ids"]
    newline = chat.encode("\n")
    differ = [i for i, (a, b) in enumerate(zip(ours.trained, theirs["assistant_masks"], strict=True)) if a != bool(b)]
    assert all([ours.ids[i]] == newline and theirs["assistant_masks"][i] for i in differ), differ
    assert any(ours.trained)
