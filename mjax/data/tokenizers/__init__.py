"""Tokenizers: text to token ids and back.

    --tokenizer                  split by       documents end with    decode(encode(text))
    gpt2:vocab.json,merges.txt   byte pairs     <|endoftext|>         text
    bert-uncased:vocab.txt       WordPiece      [SEP]                 its words, in lower case
    bert-cased:vocab.txt         WordPiece      [SEP]                 its words
    sentencepiece:FILE.model     its pieces     </s>, <|endoftext|>   text, except what a foreign model normalises
    hf:tokenizer.json            as it says     <|endoftext|>, </s>…  as it says
    bytes                        nothing        256                   text
    run:RUN                      the tokenizer of a run, such as one that `mjax convert from-hf` wrote

Two laws hold for all of them. No text encodes to the end-of-document id, `eod`, whatever it contains; and `encode` adds
nothing that is not in the text; `prompt` adds the token that begins texts, where a model was trained with one. A
tokenizer is saved as a folder next to the data and copied into the run folder, so
you name it once, on the command line of `mjax prepare`.
"""

from mjax.data.tokenizers.kinds import DESCRIPTION as DESCRIPTION
from mjax.data.tokenizers.kinds import EOD_PIECE as EOD_PIECE
from mjax.data.tokenizers.kinds import SCHEMES as SCHEMES
from mjax.data.tokenizers.kinds import BertTokenizer as BertTokenizer
from mjax.data.tokenizers.kinds import ByteTokenizer as ByteTokenizer
from mjax.data.tokenizers.kinds import HuggingFaceTokenizer as HuggingFaceTokenizer
from mjax.data.tokenizers.kinds import SentencePieceTokenizer as SentencePieceTokenizer
from mjax.data.tokenizers.kinds import Tokenizer as Tokenizer
from mjax.data.tokenizers.load import add_ends_of_text as add_ends_of_text
from mjax.data.tokenizers.load import bos_of as bos_of
from mjax.data.tokenizers.load import ends_of_text as ends_of_text
from mjax.data.tokenizers.load import files_of as files_of
from mjax.data.tokenizers.load import load_tokenizer as load_tokenizer
from mjax.data.tokenizers.load import open_library as open_library
from mjax.data.tokenizers.load import optional_object as optional_object
from mjax.data.tokenizers.load import parse_tokenizer as parse_tokenizer
from mjax.data.tokenizers.load import same_files as same_files
from mjax.data.tokenizers.load import tokenizer_from_folder as tokenizer_from_folder
from mjax.data.tokenizers.training import TRAINABLE as TRAINABLE
from mjax.data.tokenizers.training import train_sentencepiece as train_sentencepiece
from mjax.data.tokenizers.training import train_wordpiece as train_wordpiece
