"""Text that appears while it is generated: whole characters, and one text after the other."""

import io

from rich.console import Console

from mjax.data.tokenizers import ByteTokenizer
from mjax.generation.text import Live, Streamed


def test_character_appears_with_its_last_token():
    text = "aé€😀b"
    tokens = list(text.encode())
    streamed, seen = Streamed(ByteTokenizer().decode, [1, 2]), []
    for position in [0, 2, 1, 3, 4, 5, 6, 8, 7, 7, 9, 10]:  # some early, one twice
        streamed.hear(2 + position, tokens[position])
        seen.append(streamed.text)
    assert list(dict.fromkeys(seen)) == ["a", "aé", "aé€", "aé€😀", "aé€😀b"]
    streamed.hear(2 + len(tokens), None)
    assert (streamed.text, streamed.ended) == (text, True)


def test_streaming_decodes_new_tokens_only():
    decoded, text = [], "aé€😀 " * 100

    def decode(ids):
        decoded.append(len(ids))
        return ByteTokenizer().decode(ids)

    streamed = Streamed(decode, list(b"The prompt " * 50))
    for position, token in enumerate(text.encode(), start=550):
        streamed.hear(position, token)
    assert streamed.text == text
    assert max(decoded) <= 20


def test_incomplete_character_is_shown_at_end():
    streamed = Streamed(ByteTokenizer().decode, [])
    for position, token in enumerate([*b"a\xe2\x82", None]):
        streamed.hear(position, token)
    assert streamed.text == "a\ufffd"


def test_texts_grow_one_after_the_other():
    output = io.StringIO()
    live = Live(Console(file=output), ["one: ", "two: "])
    texts = [Streamed(ByteTokenizer().decode, []) for _ in range(2)]
    shown = []
    for index, position, token in [(1, 0, ord("x")), (0, 0, ord("a")), (1, 1, None), (0, 1, ord("[")), (0, 2, None)]:
        texts[index].hear(position, token)
        live.show(texts)
        shown.append(output.getvalue())
    assert shown == ["one: ", "one: a", "one: a", "one: a[", "one: a[\n\ntwo: x\n"]
