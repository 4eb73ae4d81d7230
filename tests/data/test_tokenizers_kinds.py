"""What each kind does in its own way: GPT-2's byte pairs, BERT's WordPiece, a tokenizer.json."""

import itertools
import json

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from mjax.config import GPTConfig
from mjax.data.tokenizers import GPT2Tokenizer, load_tokenizer, tokenizer_from_folder
from mjax.data.tokenizers.bert import CasedBertTokenizer, UncasedBertTokenizer
from tests.data.vocabularies import NASTY, TEXTS, byte_of_character, gpt2_files, hf_byte_pairs, hf_unigram, rank_file

# --- GPT-2 ------------------------------------------------------------------------------------------------------------

MERGES = ["Ġ t", "h e", "Ġt he", "l l", "he ll", "hell o"]


def small_gpt2():
    """The 256 bytes, six merges and `<|endoftext|>`, written by hand."""
    tokens = [*byte_of_character(), *(merge.replace(" ", "") for merge in MERGES), "<|endoftext|>"]
    vocab = json.dumps({token: number for number, token in enumerate(tokens)})
    merges = "#version: 0.2\n" + "\n".join(MERGES) + "\n"
    return tokens, GPT2Tokenizer(vocab.encode(), merges.encode(), "vocab.json", "merges.txt")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello the", ["hello", "Ġthe"]),
        ("the hello", ["t", "he", "Ġ", "hello"]),  # a space belongs to the word behind it
        ("hellhell", ["hell", "hell"]),
        ("he's", ["he", "'", "s"]),
        ("é\n", ["Ã", "©", "Ċ"]),
        ("<|endoftext|>", ["<", "|", "e", "n", "d", "o", "f", "t", "e", "x", "t", "|", ">"]),
    ],
)
def test_bytes_are_merged_in_the_order_of_learning(text, expected):
    tokens, tokenizer = small_gpt2()
    assert [tokens[token] for token in tokenizer.encode(text)] == expected


def test_the_end_of_text_in_a_text_is_text_though_the_library_would_end_a_document():
    tokens, tokenizer = small_gpt2()
    hugging_face = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    hugging_face.add_special_tokens(["<|endoftext|>"])
    assert hugging_face.encode("<|endoftext|>").ids == [tokenizer.eod]
    assert tokenizer.eod not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.decode(tokenizer.encode("<|endoftext|>")) == tokenizer.decode([tokenizer.eod])


def test_a_tiktoken_file_gives_the_ids_of_the_two_files_it_was_made_of(tmp_path):
    vocab, merges = gpt2_files(tmp_path)
    ours, ranks = load_tokenizer(f"gpt2:{vocab},{merges}"), load_tokenizer(f"gpt2:{rank_file(vocab)}")
    texts = [*TEXTS, *NASTY.values()]
    assert ranks.encode_batch(texts) == ours.encode_batch(texts)
    assert (ranks.vocabulary, ranks.eod) == (ours.vocabulary, ours.eod)
    assert ranks.contents[1] == merges.read_bytes()
    assert json.loads(ranks.contents[0]) == json.loads(vocab.read_bytes())


def test_files_with_the_line_ends_of_windows_are_read_alike(tmp_path):
    vocab, merges = gpt2_files(tmp_path)
    ours = load_tokenizer(f"gpt2:{vocab},{merges}")
    merges.write_bytes(merges.read_bytes().replace(b"\n", b"\r\n"))
    assert load_tokenizer(f"gpt2:{vocab},{merges}").encode_batch(TEXTS) == ours.encode_batch(TEXTS)


@pytest.mark.parametrize(("model_axis", "padded"), [(1, 50_304), (2, 50_432), (4, 50_688), (8, 51_200)])
def test_gpt2s_vocabulary_is_padded_as_megatrons_with_a_multiple_of_128_times_the_model_axis(model_axis, padded):
    assert GPTConfig(vocabulary=50_257, vocabulary_multiple=128 * model_axis).padded_vocabulary == padded


# --- BERT -------------------------------------------------------------------------------------------------------------

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "cafe", "[", "]", "mask", ".", "漢"]
SMALL = [*PIECES, *"abcw", "##w"]
CAPITAL = [*PIECES, "Un", "Cafe", "café", "MASK", *"ABC"]


def small_bert(kind, pieces, end="\n"):
    return kind((end.join(pieces) + end).encode(), "vocab.txt")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unaffable", ["un", "##aff", "##able"]),
        ("UNAFFABLE Café.", ["un", "##aff", "##able", "cafe", "."]),
        ("unaffably", ["[UNK]"]),
        ("a漢b", ["a", "漢", "b"]),
        ("a\tb \n c\x00\ufffd", ["a", "b", "c"]),
        ("[MASK]", ["[", "mask", "]"]),
        ("[SEP][CLS][PAD]", ["[", "[UNK]", "]"] * 3),
        ("w" * 100, ["w", *["##w"] * 99]),
        ("w" * 101, ["[UNK]"]),
    ],
)
def test_an_uncased_text_is_spelled_by_its_longest_pieces(text, expected):
    assert [SMALL[token] for token in small_bert(UncasedBertTokenizer, SMALL).encode(text)] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Unaffable unaffable", ["Un", "##aff", "##able", "un", "##aff", "##able"]),
        ("Cafe café Café", ["Cafe", "café", "[UNK]"]),
        ("[MASK]", ["[", "MASK", "]"]),
    ],
)
def test_a_cased_text_keeps_its_capitals_and_accents(text, expected):
    assert [CAPITAL[token] for token in small_bert(CasedBertTokenizer, CAPITAL).encode(text)] == expected


def test_the_tokens_of_bert_have_names_and_sep_ends_documents():
    tokenizer = small_bert(UncasedBertTokenizer, SMALL)
    assert (tokenizer.pad, tokenizer.unk, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 1, 2, 3, 4)
    assert tokenizer.eod == tokenizer.sep
    assert tokenizer.decode([2, 5, 6, 7, 3, 8, 4, 3]) == "[CLS] unaffable<|endoftext|>cafe [MASK]<|endoftext|>"


def test_the_text_of_a_beginning_is_a_beginning_of_the_text():
    tokenizer = small_bert(UncasedBertTokenizer, SMALL)
    ids = tokenizer.encode("un a. cafe.")
    texts = [tokenizer.decode(ids[:length]) for length in range(len(ids) + 1)]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    assert texts[-1] == "un a . cafe ."


def test_the_line_of_a_piece_is_its_id_whatever_ends_the_lines():
    pieces = [
        *SMALL,
        "\u2028",
        "x",
        "",
        "un",
    ]  # a separator that is a piece, an empty line, a piece for the second time
    for end in ("\n", "\r\n"):
        tokenizer = small_bert(UncasedBertTokenizer, pieces, end)
        assert tokenizer.vocabulary == len(pieces)
        assert tokenizer.encode("x un") == [pieces.index("x"), len(pieces) - 1]


def test_a_tokenizer_json_may_allow_words_of_200_characters_as_megatron_does(tmp_path):
    library = small_bert(UncasedBertTokenizer, SMALL).library
    library.model = models.WordPiece(library.get_vocab(), unk_token="[UNK]", max_input_chars_per_word=200)
    library.add_special_tokens(["[SEP]"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(f"hf:{tmp_path}/tokenizer.json")
    assert len(tokenizer.encode("w" * 200)) == 200
    assert tokenizer.encode("w" * 201) == [SMALL.index("[UNK]")]
    assert tokenizer.eod == SMALL.index("[SEP]")


# --- tokenizer.json ---------------------------------------------------------------------------------------------------


def opened(library, folder, options=""):
    library.save(str(folder / "tokenizer.json"))
    return load_tokenizer(f"hf:{folder}/tokenizer.json{options}")


def test_truncation_padding_random_merges_and_added_tokens_are_switched_off(tmp_path):
    library = hf_byte_pairs()
    library.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A <|im_end|>", special_tokens=[("<|im_end|>", library.token_to_id("<|im_end|>"))]
    )
    plain = library.encode(TEXTS[0] * 20, add_special_tokens=False).ids
    library.enable_truncation(8)
    library.enable_padding(length=16)
    library.model.dropout = 0.5
    tokenizer = opened(library, tmp_path)
    assert tokenizer.encode(TEXTS[0] * 20) == plain
    assert tokenizer.encode("") == []
    assert tokenizer.encode_batch(["a", "a b c"]) == [tokenizer.encode("a"), tokenizer.encode("a b c")]


@pytest.mark.parametrize(
    ("special", "eod"),
    [
        (["<s>", "</s>", "[SEP]"], "</s>"),
        (["[SEP]", "<|im_end|>", "<|endoftext|>"], "<|endoftext|>"),
        (["<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"], "<|end_of_text|>"),
        (["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"], "<｜end▁of▁sentence｜>"),
        (["<bos>", "<eos>"], "<eos>"),
        (["[CLS]", "[SEP]"], "[SEP]"),
    ],
)
def test_the_end_of_a_document_is_found_by_its_usual_names(tmp_path, special, eod):
    library = hf_byte_pairs(special)
    tokenizer = opened(library, tmp_path)
    assert tokenizer.eod == library.token_to_id(eod)
    assert tokenizer.eod not in tokenizer.encode(f"a {eod} b{eod}")


def test_the_end_of_a_document_that_is_named_is_kept_with_the_tokenizer(tmp_path):
    tokenizer = opened(hf_byte_pairs(), tmp_path, ",eod=<|im_end|>")
    assert tokenizer.eod == 1
    assert tokenizer.decode([0, 1]) == "<|endoftext|><|endoftext|>"  # the other special token is shown as well
    tokenizer.save(tmp_path / "saved")
    assert tokenizer_from_folder(tmp_path / "saved").eod == 1
    ids = tokenizer_from_folder(tmp_path / "saved").encode("one<|im_end|>two<|endoftext|>")
    assert not {0, 1} & set(ids)


def test_an_added_token_that_is_not_special_can_end_documents_and_is_no_longer_found_in_text(tmp_path):
    library = hf_byte_pairs([])
    library.add_tokens([AddedToken("<end>", special=False)])
    assert 330 in library.encode("a<end>").ids
    tokenizer = opened(library, tmp_path, ",eod=<end>")
    assert (tokenizer.eod, tokenizer.vocabulary) == (330, 331)
    assert tokenizer.decode(tokenizer.encode("a<end>")) == "a<end>"
    assert 330 not in tokenizer.encode("a<end>")


@pytest.mark.parametrize("splits", [pre_tokenizers.Metaspace(), None, pre_tokenizers.Metaspace(split=False)])
def test_an_end_that_a_unigram_model_knows_as_a_piece_is_spelled_in_two(tmp_path, splits):
    library = hf_unigram()
    if splits is None:
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.pre_tokenizer = splits
    library.encode_special_tokens = True
    assert 1 in library.encode("a</s>").ids  # what the model alone would do
    tokenizer = opened(library, tmp_path)
    assert tokenizer.eod == 1
    assert 1 not in tokenizer.encode("a</s> </s></s>b")
    assert tokenizer.decode(tokenizer.encode("a</s> </s></s>b")) == "a</s> </s></s>b"
    for text in TEXTS:  # any other text is encoded as it was
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
