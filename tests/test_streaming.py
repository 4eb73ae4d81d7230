"""Text that appears while it is generated: whole characters, and one text after the other."""

import io
from random import Random

import pytest
import tokenizers
from rich.console import Console
from tokenizers import decoders, models, normalizers

from mjax.data.tokenizers import ByteTokenizer, train_sentencepiece
from mjax.generation.text import Live, StreamingText, decode_suffix
from tests.test_chat import bytes_with_special_tokens


def test_character_appears_with_its_last_token():
    text = "aé€😀b"
    tokens = list(text.encode())
    streamed, seen = StreamingText(ByteTokenizer().decode, [1, 2]), []
    for token in tokens[:-1]:
        streamed.add(token)
        seen.append(streamed.text)
    assert list(dict.fromkeys(seen)) == ["a", "aé", "aé€", "aé€😀"]
    streamed.finish(tokens)
    assert (streamed.text, streamed.ended) == (text, True)


def test_streaming_decodes_new_tokens_only():
    decoded, text = [], "aé€😀 " * 100

    def decode(ids):
        decoded.append(len(ids))
        return ByteTokenizer().decode(ids)

    streamed = StreamingText(decode, list(b"The prompt " * 50))
    for token in text.encode():
        streamed.add(token)
    assert streamed.text == text
    assert max(decoded) <= 20


def test_incomplete_character_is_shown_at_end():
    streamed = StreamingText(ByteTokenizer().decode, [])
    for token in [*b"a\xe2\x82", None]:
        streamed.add(token)
    assert streamed.text == "a\ufffd"


def test_texts_grow_one_after_the_other():
    output = io.StringIO()
    live = Live(Console(file=output), ["one: ", "two: "])
    texts = [StreamingText(ByteTokenizer().decode, []) for _ in range(2)]
    shown = []
    for index, token in [(1, ord("x")), (0, ord("a")), (1, None), (0, ord("[")), (0, None)]:
        texts[index].add(token)
        live.show(texts)
        shown.append(output.getvalue())
    assert shown == ["one: ", "one: a", "one: a", "one: a[", "one: a[\n\ntwo: x\n"]


RARE = ["𝔞𝔟", "🙂", "👩\u200d👩\u200d👧", "क्षि", "กำนันทำ", "ꯃꯩꯇꯩꯂꯣꯟ", "東京都庁舎前", "가나다라", "é"]
RARE += [" a dog ", "x", ".", "\n", "  ", "Ωμέγα"]


def with_byte_fallback(decoder):
    """A tokenizer like Llama 2's (its decoder strips the text) or Gemma's (Metaspace): rare characters are bytes."""
    vocabulary = ["<unk>", *"▁adgox.\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({piece: id for id, piece in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True)
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoder
    return (lambda text: library.encode(text).ids, lambda ids: library.decode(ids, skip_special_tokens=False))


def kinds():
    """(encode, decode) of each kind of tokenizer."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    pieces, library = train_sentencepiece(["a dog and x."] * 9, 275), bytes_with_special_tokens()
    return {
        "bytes": (ByteTokenizer().encode, ByteTokenizer().decode),
        "byte-level": (lambda text: library.encode(text).ids, library.decode),
        "sentencepiece": (pieces.encode, pieces.decode),
        "Llama": with_byte_fallback(decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])),
        "Gemma": with_byte_fallback(decoders.Sequence(parts)),
    }


@pytest.mark.parametrize("kind", ["bytes", "byte-level", "sentencepiece", "Llama", "Gemma"])
def test_streamed_text_is_the_text(kind):
    """Every kind of tokenizer, for whole texts and for texts that end within a character."""
    (encode, decode), random = kinds()[kind], Random(0)
    for number in range(300):
        prompt, tokens = (encode("".join(random.choices(RARE, k=random.randint(1, 6)))) for _ in range(2))
        tokens = tokens[: len(tokens) - number % 3]
        output = io.StringIO()
        live, streamed = Live(Console(file=output), [""]), StreamingText(decode, prompt)
        for token in tokens:
            streamed.add(token)
            live.show([streamed])
        streamed.finish(tokens)
        live.show([streamed])
        written = decode_suffix(decode, prompt, tokens)
        assert output.getvalue() == written + "\n"
        assert number % 3 or decode(prompt) + written == decode(prompt + tokens)


def test_half_a_character_leaves_text_before_it():
    """Byte fallback decodes a run of bytes that is not whole to U+FFFD altogether."""
    _, decode = with_byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]))
    prompt, half = [9 + byte for byte in "क".encode()], 9 + 0xE0
    assert decode_suffix(decode, prompt, [half]) == "\ufffd"
    assert decode_suffix(decode, prompt, [*prompt, half, 2]) == "क\ufffda"
