"""Behaviour of each kind of tokenizer, and vocabularies that are trained on the user's text."""

import itertools
import json
from functools import partial

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from mjax.data.tokenizers import (
    SentencePieceTokenizer,
    load_tokenizer,
    parse_tokenizer,
    tokenizer_from_folder,
    train_sentencepiece,
    train_wordpiece,
)
from mjax.errors import UsageError
from tests.data.vocabularies import (
    NASTY,
    TEXTS,
    byte_of_character,
    foreign_model,
    gpt2_files,
    hf_byte_pairs,
    hf_unigram,
)

# --- GPT-2 ------------------------------------------------------------------------------------------------------------

MERGES = ["Ġ t", "h e", "Ġt he", "l l", "he ll", "hell o"]


@pytest.mark.parametrize("version", ["#version: 0.2\n", ""])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello the", ["hello", "Ġthe"]),
        ("the hello", ["t", "he", "Ġ", "hello"]),  # a space belongs to the word behind it
        ("he's é\n", ["he", "'", "s", "Ġ", "Ã", "©", "Ċ"]),
        ("<|endoftext|>", ["<", "|", "e", "n", "d", "o", "f", "t", "e", "x", "t", "|", ">"]),
    ],
)
def test_gpt2_merges_bytes_in_learned_order(text, expected, version):
    tokens = [*byte_of_character(), *(merge.replace(" ", "") for merge in MERGES), "<|endoftext|>"]
    vocab = json.dumps({token: number for number, token in enumerate(tokens)})
    merges = version + "\n".join(MERGES) + "\n"
    tokenizer = parse_tokenizer("gpt2", [vocab.encode(), merges.encode()], ["vocab.json", "merges.txt"])
    assert [tokens[token] for token in tokenizer.encode(text)] == expected


def test_gpt2_files_of_windows_give_same_ids(tmp_path):
    vocab, merges = gpt2_files(tmp_path)
    texts, tokenizer = [*TEXTS, *NASTY.values()], load_tokenizer(f"gpt2:{vocab},{merges}")
    merges.write_bytes(merges.read_bytes().replace(b"\n", b"\r\n"))
    assert load_tokenizer(f"gpt2:{vocab},{merges}").encode_batch(texts) == tokenizer.encode_batch(texts)


# --- BERT -------------------------------------------------------------------------------------------------------------

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "cafe", "[", "]", "mask", ".", "漢"]
SMALL = [*PIECES, *"abcw", "##w"]


def small_bert(kind, pieces, end="\n"):
    return parse_tokenizer(kind, [(end.join(pieces) + end).encode()], ["vocab.txt"])


def test_bert_joins_pieces_and_shows_specials():
    tokenizer = small_bert("bert-uncased", SMALL)
    assert (tokenizer.pad, tokenizer.unk, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 1, 2, 3, 4)
    assert tokenizer.decode([2, 5, 6, 7, 3, 8, 4, 3]) == "[CLS] unaffable<|endoftext|>cafe [MASK]<|endoftext|>"
    assert tokenizer.decode(tokenizer.encode("un a. cafe.")) == "un a . cafe ."


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_bert_ids_are_line_numbers(end):
    """A separator may be a piece, a line empty, and of equal pieces the last one counts."""
    pieces = [*SMALL, "\u2028", "x", "", "un"]
    tokenizer = small_bert("bert-uncased", pieces, end)
    assert tokenizer.vocabulary == len(pieces)
    assert tokenizer.encode("x un") == [pieces.index("x"), len(pieces) - 1]


# --- tokenizer.json ---------------------------------------------------------------------------------------------------


def opened(library, folder, options=""):
    library.save(str(folder / "tokenizer.json"))
    return load_tokenizer(f"hf:{folder}/tokenizer.json{options}")


def test_hf_truncation_padding_and_dropout_are_off(tmp_path):
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


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>", "$A </s>", "<s> <t> $A"])
def test_hf_takes_one_token_before_texts(tmp_path, template):
    library = hf_byte_pairs(["<s>", "<t>", "</s>"])
    ids = [(token, library.token_to_id(token)) for token in ("<s>", "<t>", "</s>")]
    library.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    special = [(token, number) for token, number in ids if token in template.partition("$A")[0]]
    tokenizer = opened(library, tmp_path)
    if len(special) > 1:
        with pytest.raises(UsageError, match=r"puts 2 tokens .*<s> <t>.* --tokenizer hf:"):
            tokenizer.find_bos()
    else:
        assert tokenizer.find_bos() == (special[0][1] if special else None)


@pytest.mark.parametrize(
    ("special", "eod"),
    [(["<s>", "</s>", "[SEP]"], "</s>"), (["<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"], "<|end_of_text|>")],
)
def test_hf_end_of_document_has_usual_names(tmp_path, special, eod):
    library = hf_byte_pairs(special)
    tokenizer = opened(library, tmp_path)
    assert tokenizer.eod == library.token_to_id(eod)
    assert tokenizer.eod not in tokenizer.encode(f"a {eod} b{eod}")


def test_hf_named_end_of_document_is_kept(tmp_path):
    """An added token that is not special can be it."""
    library = hf_byte_pairs([])
    library.add_tokens([AddedToken("<end>", special=False)])
    assert 330 in library.encode("a<end>").ids
    opened(library, tmp_path, ",eod=<end>").save(tmp_path / "saved")
    tokenizer = tokenizer_from_folder(tmp_path / "saved")
    assert (tokenizer.eod, tokenizer.vocabulary) == (330, 331)
    assert 330 not in tokenizer.encode("a<end>")


@pytest.mark.parametrize("splits", [pre_tokenizers.Metaspace(), None])
def test_hf_unigram_end_is_spelled_in_two(tmp_path, splits):
    library = hf_unigram()
    if splits is None:
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.pre_tokenizer = splits
    library.encode_special_tokens = True
    assert 1 in library.encode("a</s>").ids  # what the model alone would do
    tokenizer = opened(library, tmp_path)
    assert tokenizer.eod == 1
    assert 1 not in tokenizer.encode("a</s> </s></s>b")
    for text in TEXTS:  # any other text has the same ids as before
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


# --- sentencepiece ----------------------------------------------------------------------------------------------------


def test_sentencepiece_end_is_a_control_piece():
    with_end = foreign_model(eos_id=-1, control_symbols=["<|endoftext|>"])
    assert SentencePieceTokenizer(with_end, "x.model").eod == 2
    with pytest.raises(UsageError, match=r"x.model has no control piece that ends sentences or is <\|endoftext\|>"):
        SentencePieceTokenizer(foreign_model(eos_id=-1, user_defined_symbols=["<|endoftext|>"]), "x.model")


def test_trained_sentencepiece_is_lossless_and_deterministic():
    trained = train_sentencepiece(TEXTS, 380)
    assert trained.vocabulary == 380
    assert train_sentencepiece(iter(TEXTS), 380).contents == trained.contents
    for text in (text for text in NASTY.values() if "▁" not in text):
        assert trained.decode(trained.encode(text)) == text
        assert trained.eod not in trained.encode(text)
    long = train_sentencepiece(["a " * 20_000 + "wonderful " * 20_000], 280)  # longer than sentencepiece takes
    assert len(long.encode("a wonderful a")) == 3


# --- Trained vocabularies ---------------------------------------------------------------------------------------------

FOXES = [
    f"The {colour} fox {verb} over Émile's lazy dogs, {number} times!"
    for number, (colour, verb) in enumerate(
        itertools.product(["quick", "brown", "unbelievable"], ["jumps", "jumped", "was jumping", "will believe"])
    )
]


@pytest.mark.parametrize(
    ("kind", "size", "text"), [("bert-uncased", 120, "the fox , emile !"), ("bert-cased", 190, "The fox , Émile !")]
)
def test_trained_wordpiece_knows_letters_and_words(kind, size, text):
    trained = train_wordpiece(FOXES, size, kind)
    pieces = trained.contents[0].decode().splitlines()
    assert len(pieces) == len(set(pieces)) == trained.vocabulary == size
    assert pieces[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = {letter for line in FOXES for letter in line if letter.isascii() and not letter.isspace()}
    letters = {letter.lower() for letter in letters} if kind == "bert-uncased" else letters
    assert letters | {f"##{letter}" for letter in letters} <= set(pieces)
    assert len(trained.encode("over")) == len(trained.encode("lazy")) == 1
    assert trained.decode(trained.encode("The fox, Émile!")) == text
    assert train_wordpiece(iter(FOXES), size, kind).contents == trained.contents


train_uncased = partial(train_wordpiece, scheme="bert-uncased")


@pytest.mark.parametrize(
    ("train", "texts", "size", "words"),
    [
        (train_sentencepiece, TEXTS, 9000, r"--vocabulary 9000 is too large.*; use --vocabulary \d+ or less"),
        (train_sentencepiece, TEXTS, 200, r"--vocabulary 200 is too small.*; use --vocabulary \d+ or more"),
        (train_uncased, FOXES, 90_000, r"--vocabulary 90000 is too large.*; use --vocabulary \d+ or less"),
        (train_uncased, FOXES, 40, r"--vocabulary 40 is too small.*; use --vocabulary \d+ or more"),
    ],
)
def test_vocabulary_size_that_fits_is_named(train, texts, size, words):
    with pytest.raises(UsageError, match=words) as error:
        train(texts, size)
    fits = int(str(error.value).split("use --vocabulary ")[1].split()[0].rstrip(","))
    assert train(texts, fits).vocabulary == fits
