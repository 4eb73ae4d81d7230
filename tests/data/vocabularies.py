"""Texts that break tokenizers, and small tokenizers of every kind, trained here on a few sentences."""

import io
import json
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n\nIt was the best of times, it was the worst of times.\n",
    "def train(step):\n    for batch in batches:\n        loss = model(batch)\n    return loss\n",
    "Ça, c'est déjà vu: naïve café, 1968 — 2001.\tΑ and Ω.\n",
] * 3

NASTY = {
    "empty": "",
    "only spaces": "     ",
    "spaces around": "  two  spaces ",
    "line ends": "\n\n \r\n\n\r",
    "no-break and wide spaces": "x\u00a0y\u3000z\u2028w\u2029\u0085v",
    "NUL": "a\x00b\x00",
    "control characters": "\x01\x02\x1b[0m\x7f\x85\u200b\u200d",
    "byte order mark": "\ufeffbegin \ufeff",
    "emoji": "👩‍👩‍👧 family, 👨🏽‍🚀 and 🇫🇷!",
    "CJK": "漢字かな交じり文、中文。한국어",
    "Arabic": "مرحبا بالعالم ٣",
    "combining marks": "e\u0301 é n\u0303 ṩ s\u0323\u0307",
    "case that changes length": "İstanbul ẞ ß ﬁ Ⅷ ①",
    "contractions": "don't it's we'll I'VE they’re",
    "noncharacter": "\ufffe \U0001ffff",
    "sentencepiece's space": "▁ x ▁▁y",
    "byte pairs' space": "Ġthe ĊĠ",
    "101 characters": "w" * 101,
    "201 characters": "w" * 201 + " the",
    "GPT-2's end": "one<|endoftext|>two <|endoftext|>",
    "BERT's specials": "[CLS] a [MASK] b [SEP][PAD] [UNK]",
    "sentencepiece's specials": "<s>a</s> </s><unk><0x0A><pad>",
    "other ends": "<|end_of_text|> <eos> <|im_end|> <extra_id_0>",
}


# --- GPT-2 ------------------------------------------------------------------------------------------------------------


def byte_of_character():
    """GPT-2's printable characters and the bytes they stand for, as its encoder.py has them."""
    numbers = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [number for number in range(256) if number not in numbers]
    return {chr(n): n for n in numbers} | {chr(256 + i): n for i, n in enumerate(others)}


def gpt2_files(folder: Path, merges=120) -> tuple[Path, Path]:
    """vocab.json and merges.txt of byte pairs learned from TEXTS, `<|endoftext|>` last as in GPT-2."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, vocab_size=256 + merges, min_frequency=1, show_progress=False)
    vocab, lines = map(Path, trained.save_model(str(folder)))
    ids = json.loads(vocab.read_text(encoding="utf-8"))
    vocab.write_text(json.dumps(ids | {"<|endoftext|>": len(ids)}), encoding="utf-8")
    return vocab, lines


# --- BERT -------------------------------------------------------------------------------------------------------------


def bert_file(folder: Path, lowercase: bool) -> Path:
    """vocab.txt of WordPiece learned from TEXTS; the cased one knows all capitals."""
    trained = tokenizers.BertWordPieceTokenizer(lowercase=lowercase, strip_accents=lowercase)
    alphabet = [] if lowercase else [chr(number) for number in range(ord("A"), ord("Z") + 1)]
    trained.train_from_iterator(TEXTS, vocab_size=260, min_frequency=1, show_progress=False, initial_alphabet=alphabet)
    folder.mkdir(exist_ok=True)
    return Path(trained.save_model(str(folder))[0])


# --- sentencepiece ----------------------------------------------------------------------------------------------------


def foreign_model(**options) -> bytes:
    """A sentencepiece model of someone else, with the trainer's own defaults (unigram) but for `options`."""
    model = io.BytesIO()
    arguments = {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=model, **arguments)
    return model.getvalue()


LLAMA = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "split_digits": True}
LLAMA |= {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "vocab_size": 380}
"""Options that LLaMA's model was trained with."""
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "user_defined_symbols": ["<extra_id_0>", "<extra_id_1>"]}
"""Options that T5's model was trained with."""


# --- tokenizer.json ---------------------------------------------------------------------------------------------------


def hf_unigram() -> tokenizers.Tokenizer:
    """Write a model like T5's or XLM-R's, which knows `</s>` as a piece."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    texts = [*TEXTS, "a < / s > b", "s/ /s> <s"]
    tokenizer.train_from_iterator(
        texts, trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    )
    return tokenizer


def hf_byte_pairs(special=("<|endoftext|>", "<|im_end|>")) -> tokenizers.Tokenizer:
    """Write a model like GPT-NeoX's or Llama 3's: bytes, and special tokens added."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


NAMES = [
    *("gpt2", "bert-uncased", "bert-cased", "sentencepiece, unigram", "sentencepiece, as LLaMA"),
    *("sentencepiece, as T5", "hf, unigram", "hf, byte pairs", "bytes"),
]
"""The small tokenizers of `specs`."""


def specs(folder: Path) -> dict[str, str]:
    """What to type after --tokenizer for each of NAMES; their files are made in `folder`."""
    vocab, merges = gpt2_files(folder)
    files = {
        "unigram.model": foreign_model(),
        "llama.model": foreign_model(**LLAMA),
        "t5.model": foreign_model(**T5),
        "unigram.json": hf_unigram().to_str().encode(),
        "bpe.json": hf_byte_pairs().to_str().encode(),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return {
        "gpt2": f"gpt2:{vocab},{merges}",
        "bert-uncased": f"bert-uncased:{bert_file(folder / 'uncased', lowercase=True)}",
        "bert-cased": f"bert-cased:{bert_file(folder / 'cased', lowercase=False)}",
        "sentencepiece, unigram": f"sentencepiece:{folder}/unigram.model",
        "sentencepiece, as LLaMA": f"sentencepiece:{folder}/llama.model",
        "sentencepiece, as T5": f"sentencepiece:{folder}/t5.model",
        "hf, unigram": f"hf:{folder}/unigram.json",
        "hf, byte pairs": f"hf:{folder}/bpe.json",
        "bytes": "bytes",
    }
