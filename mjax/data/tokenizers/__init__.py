"""Tokenizers: text to token ids and back.

    --tokenizer                  split by       documents end with    decode(encode(text))
    gpt2:vocab.json,merges.txt   byte pairs     <|endoftext|>         text
    gpt2:FILE.tiktoken           byte pairs     <|endoftext|>         text
    bert-uncased:vocab.txt       WordPiece      [SEP]                 its words, in small letters
    bert-cased:vocab.txt         WordPiece      [SEP]                 its words
    sentencepiece:FILE.model     its pieces     </s>, <|endoftext|>   text, but for what a foreign model normalises
    hf:tokenizer.json            as it says     <|endoftext|>, </s>…  as it says
    bytes                        nothing        256                   text

Two laws hold for every kind. No text encodes to the end-of-document id, `eod`, whatever is written in it; and `encode`
adds nothing that is not in the text. A tokenizer is saved beside the data as a folder and copied into the folder of a
run, so that it is named once, on the command line of `mjax prepare`.
"""

from mjax.data.tokenizers.bert import BertTokenizer, CasedBertTokenizer, UncasedBertTokenizer
from mjax.data.tokenizers.gpt2 import GPT2Tokenizer
from mjax.data.tokenizers.huggingface import HuggingFaceTokenizer
from mjax.data.tokenizers.interface import DESCRIPTION, EOD_PIECE, Tokenizer
from mjax.data.tokenizers.opening import KINDS, load_tokenizer, tokenizer_from_folder
from mjax.data.tokenizers.pieces import SentencePieceTokenizer, train_sentencepiece
from mjax.data.tokenizers.utf8_bytes import ByteTokenizer
from mjax.data.tokenizers.wordpiece import train_wordpiece

__all__ = [
    "DESCRIPTION",
    "EOD_PIECE",
    "KINDS",
    "BertTokenizer",
    "ByteTokenizer",
    "CasedBertTokenizer",
    "GPT2Tokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "UncasedBertTokenizer",
    "load_tokenizer",
    "tokenizer_from_folder",
    "train_sentencepiece",
    "train_wordpiece",
]
