"""The tokenizer of a model, between a run folder and a Hugging Face model folder.

An export contains the files it was made from and `mjax_tokenizer.json`, so that an import restores it. For
`transformers.AutoTokenizer` it has an equivalent tokenizer.json with the same ids. GPT-2's, BERT's and Hugging Face's
run on the `tokenizers` library here too. Bytes are byte pairs without merges. sentencepiece joins the neighbors whose
piece has the best score, the library those whose pair was learned first: every two pieces that make a third are a pair,
in the order of the third's score. Spaces become "▁", and one is put in front.

The library has no exact counterpart of everything, so ids and text of the two are compared before a file is written.
"""

from __future__ import annotations

import json
import math
import random
from copy import copy
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as BackendTokenizer

from mjax.config.model import ModelConfig
from mjax.data.tokenizer_trial import SAMPLE_TEXT, mark_trusted
from mjax.data.tokenizers import (
    DESCRIPTION_FILE,
    EOD_PIECE,
    SCHEMES,
    BertTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    add_special_tokens,
    byte_level_bpe,
    bytes_to_unicode,
    convert_errors,
    load_tokenizer,
    open_backend,
    parse_tokenizer,
    tokenizer_from_folder,
)
from mjax.errors import UsageError
from mjax.interop.model_folder import read_object, write_object

ADDED = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""Settings of an added token."""
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"


SPACE = "▁"  # U+2581, sentencepiece's
WEIGHTS_ALONE = "export the weights alone with --tokenizer none"
AWKWARD = (
    SAMPLE_TEXT,
    "  naïve café, e\u0301 s\u0323\u0307 ﬁ\u0301 Ⅷ ① ½ İ ẞ 漢字、한국어 हिन्दी ภาษาไทย مرحبا 👩‍👩‍👧🇫🇷",
    "\u00a0no\u3000break\u200b\u2028\ufeff",
    f"a\x00\x01\x7f {SPACE}Ġ <s>a</s> <unk><0x0A><pad> [CLS] [MASK] [SEP] {EOD_PIECE}one",
    " ",
)
"""Texts on which tokenizers often differ."""


def find_tokenizer(folder: Path, given: str | None) -> Tokenizer | None:
    """The tokenizer `given` as in `mjax prepare --tokenizer`, or that of a model folder, with the token that begins its
    texts; None: it has none.

    Raises:
      UsageError: its files are damaged.
    """
    if given is not None:
        return load_tokenizer(given)
    if (folder / DESCRIPTION_FILE).is_file():
        return tokenizer_from_folder(folder)
    settings = read_object(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    if (folder / "tokenizer.json").is_file():
        tokenizer = _find_fast(folder, settings)
        tokenizer.bos = tokenizer.find_bos()
        return tokenizer
    lowercase = settings.get("do_lower_case")
    bert = isinstance(lowercase, bool) and settings.get("strip_accents") in (None, lowercase)
    bert = bert and settings.get("tokenize_chinese_chars") is not False
    kinds = (["bert-uncased" if lowercase else "bert-cased"] if bert else []) + ["gpt2", "sentencepiece"]
    for kind in kinds:
        files = [folder / name for name in SCHEMES[kind][1]]
        if not all(file.is_file() for file in files):
            continue
        name = str(settings.get("tokenizer_class") or "GPT2Tokenizer")
        if kind == "gpt2" and name.removesuffix("Fast") != "GPT2Tokenizer":
            fix = "add its tokenizer.json, which save_pretrained of transformers writes"
            raise UsageError(f"{folder} has the vocab.json of a {name}, which cuts other words than GPT-2; {fix}")
        tokenizer = parse_tokenizer(kind, [file.read_bytes() for file in files], [*map(str, files)])
        if settings.get("add_bos_token") is True:  # if no tokenizer.json has it
            tokenizer.bos = tokenizer.find_bos()
        return tokenizer
    return None


def _find_fast(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    """Read tokenizer.json, with the tokens that only tokenizer_config.json has, and its end token."""
    file, source = folder / "tokenizer.json", folder / SETTINGS
    content, added = file.read_bytes(), settings.get("added_tokens_decoder") or {}
    library = open_backend(content, str(file))
    with convert_errors(f"{source}: added_tokens_decoder does not describe tokens", "restore the file"):
        listed = [(int(number), token) for number, token in added.items()]
        tokens = [
            (number, AddedToken(**{name: token[name] for name in ADDED if name in token}))
            for number, token in sorted(listed, key=lambda item: item[0])
            if library.token_to_id(token["content"]) is None
        ]
    for number, token in tokens:
        (library.add_special_tokens if token.special else library.add_tokens)([token])
        if library.token_to_id(token.content) != number:
            there = f"where {file} has {library.token_to_id(token.content)} for the next one"
            raise UsageError(f"{source} gives {token.content} the id {number}, {there}; save it again")
    end = settings.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    if end not in [token.content for token in library.get_added_tokens_decoder().values()]:
        end = None
    return parse_tokenizer("hf", [library.to_str().encode() if tokens else content], [str(file)], end)


def write_tokenizer(tokenizer: Tokenizer, library: BackendTokenizer, folder: Path, model: ModelConfig) -> None:
    """Write a tokenizer into a model folder: its own files, for mjax, and a tokenizer.json, for `transformers`.

    Args:
      tokenizer: the tokenizer.
      library: the result of `fast_tokenizer`.
      folder: the model folder.
      model: the exported model. A GPT's tokenizer adds at most `bos` to a text and matches no special token in it, as
        in mjax. A BERT's adds [CLS] and [SEP] and matches a written [MASK], as users of BERTs expect.
    """
    pairs = model.samples != "text"
    content = library.to_str(pretty=True).encode()
    if tokenizer.scheme == "hf":  # whose own file has that name
        mark_trusted(content, "tokenizers")  # it has been compared with the tried one
        tokenizer = copy(tokenizer)
        tokenizer.contents = (content,)
    tokenizer.save(folder)
    (folder / "tokenizer.json").write_bytes(content)
    end, begin = library.id_to_token(tokenizer.eod), library.id_to_token(tokenizer.prefix_id)
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": not pairs,
        "model_input_names": ["input_ids", *(["token_type_ids"] if pairs else []), "attention_mask"],
    }
    if isinstance(tokenizer, BertTokenizer):
        values |= {f"{token.strip('[]').lower()}_token": token for token in BertTokenizer.special}
        if isinstance(normalizer := library.normalizer, normalizers.BertNormalizer):
            values |= {"do_lower_case": normalizer.lowercase, "tokenize_chinese_chars": True, "strip_accents": None}
    if not pairs:
        values |= {"bos_token": begin, "eos_token": end}
    write_object(folder / "tokenizer_config.json", values)


# --- The same ids in tokenizer.json -----------------------------------------------------------------------------------


def fast_tokenizer(tokenizer: Tokenizer, pairs: bool = False) -> BackendTokenizer:
    """The same tokenizer in the `tokenizers` library, with the special tokens that `transformers` expects.

    Args:
      tokenizer: any kind.
      pairs: add [CLS] and [SEP] around texts, as for a BERT; else at most the token that begins texts is added.

    Raises:
      UsageError: the library does not give the same ids and text; the message shows where.
    """
    if isinstance(tokenizer, SentencePieceTokenizer):
        library = _convert_sentencepiece(tokenizer.processor)
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        values = json.loads(tokenizer.backend.to_str())
        if not (pairs and isinstance(tokenizer, BertTokenizer)):
            values["post_processor"] = None  # the model was not trained with what it adds
        library = BackendTokenizer.from_str(json.dumps(values))
    else:
        pieces = {piece: byte for byte, piece in enumerate([*bytes_to_unicode(), EOD_PIECE])}
        library = byte_level_bpe(pieces, [], words=False)
    _check_same(tokenizer, library)
    if tokenizer.bos is not None:
        piece = library.id_to_token(tokenizer.bos)
        library.post_processor = processors.TemplateProcessing(
            single=[piece, "$A"], special_tokens=[(piece, tokenizer.bos)]
        )
    return library


def _check_same(tokenizer: Tokenizer, library: BackendTokenizer) -> None:
    """Compare the two, with the second used as in `transformers`, on difficult texts and on every piece."""
    library = BackendTokenizer.from_str(library.to_str())  # as read from the file
    library.encode_special_tokens = True
    for text in _texts(tokenizer):
        ids, other = tokenizer.encode(text), library.encode(text, add_special_tokens=False).ids
        if ids == other and tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False):
            continue
        same = next((i for i, (one, two) in enumerate(zip(ids, other, strict=False)) if one != two), 0)
        problem = f"{tokenizer.decode(ids[same:])[:40]!r} has other ids or another text there"
        raise UsageError(f"the {tokenizer.scheme} tokenizer has no equal in transformers: {problem}; {WEIGHTS_ALONE}")


def _texts(tokenizer: Tokenizer) -> list[str]:
    """Difficult texts; all pieces in random order, always the same; and both mixed, with runs of spaces."""
    draw = random.Random(0)
    ids = [number for number in range(tokenizer.vocabulary) if number != tokenizer.eod]
    draw.shuffle(ids)
    pieces = [tokenizer.decode(ids[start : start + 100]) for start in range(0, len(ids), 100)]
    characters = "".join(AWKWARD)
    mixed = []
    for _ in range(200):
        some = [tokenizer.decode([draw.choice(ids)]) for _ in range(20)]
        some += [*draw.choices(characters, k=20), " " * draw.randint(1, 20)]
        draw.shuffle(some)
        mixed.append("".join(some))
    return [*AWKWARD, *pieces, *mixed]


# --- sentencepiece ----------------------------------------------------------------------------------------------------


def _convert_sentencepiece(processor: SentencePieceProcessor) -> BackendTokenizer:
    """Byte pairs of the library for a model of byte pairs without normalization; others fail `_check_same`."""
    ids = {processor.id_to_piece(number): number for number in range(processor.vocab_size())}
    special = [piece for piece, number in ids.items() if processor.is_control(number) or processor.is_unknown(number)]
    bytes_of = [piece for piece, number in ids.items() if processor.is_byte(number)]
    scores = {piece: processor.get_score(ids[piece]) for piece in ids if piece not in {*special, *bytes_of}}
    given = _user_pieces(scores)
    learned = {piece: score for piece, score in scores.items() if piece not in given}

    unknown = processor.id_to_piece(processor.unk_id())
    prefix = processor.encode("a", out_type=str)[0].startswith(SPACE)
    library = BackendTokenizer(_byte_pairs(ids, learned, unknown, bool(bytes_of)))
    library.normalizer = normalizers.Sequence([normalizers.Replace(" ", SPACE), *[normalizers.Prepend(SPACE)] * prefix])
    steps = [decoders.Replace(unknown, processor.decode([processor.unk_id()])), decoders.Replace(SPACE, " ")]
    steps += [decoders.ByteFallback(), decoders.Fuse(), *[decoders.Strip(" ", 1, 0)] * prefix]
    library.decoder = decoders.Sequence(steps)
    add_special_tokens(library, *special)
    # Pieces of the user are never split or joined; a single character that is part of no other is never joined anyway.
    inside = {character for piece in learned for character in piece}
    looked_for = [text for text in scores if text in given and (len(text) > 1 or text in inside)]
    library.add_tokens([AddedToken(text, special=False, normalized=True) for text in looked_for])
    return library


def _user_pieces(scores: dict[str, float]) -> set[str]:
    """Pieces that were not learned: the trainer gives them the score 0.0, and those it learns -0.0, -1.0, …"""
    return {piece for piece, score in scores.items() if score == 0 and math.copysign(1, score) > 0}


def _byte_pairs(ids: dict[str, int], scores: dict[str, float], unknown: str, byte_fallback: bool) -> models.BPE:
    """Every two pieces that make a third are a pair, ordered by the score of the third."""
    pairs = [
        (text[:cut], text[cut:])
        for text in sorted(scores, key=lambda text: (-scores[text], ids[text]))
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    return models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)


# --- Files that mjax only carries -------------------------------------------------------------------------------------
#
# In a run folder they stand next to the tokenizer's, and go out again with an export:
#
#     RUN/tokenizer/chat_template.jinja      the default chat template, wherever the model folder had it
#     RUN/tokenizer/tokenizer_config.json    class and special tokens for `transformers`; other templates by name
#     RUN/tokenizer/generation_config.json   the ids that end a text, and how the model is meant to be sampled
#     RUN/tokenizer/special_tokens_map.json, tokenizer.model, …   byte for byte
#
# So `AutoTokenizer` gives for an export what it gave for the source: ids, special tokens and `apply_chat_template`. A
# template is a file of its own since transformers 4.43, and before that a setting `chat_template` of
# tokenizer_config.json, as text or as a list of named templates. Both are read, and both are written: except several
# templates, which are a list, because a file next to it would hide the others.

TEMPLATE, NAMED = "chat_template.jinja", "additional_chat_templates"
UNREAD = (
    *("special_tokens_map.json", "added_tokens.json", "tokenizer.json", "tokenizer.model"),
    *("vocab.json", "merges.txt"),
)
"""Files of a tokenizer that are carried as they are."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def collect_files(folder: Path, config: dict[str, Any], positions: int | None = None) -> dict[str, bytes]:
    """The files of a model folder to put next to the tokenizer of a run; none without a tokenizer_config.json.

    Args:
      folder: of the model.
      config: its config.json, which has the ids that end a text where there is no generation_config.json.
      positions: the least `model_max_length`, at which `transformers` truncates texts; None leaves it as it is.

    Raises:
      UsageError: one of them is damaged.
    """
    if not (folder / SETTINGS).is_file():
        return {}
    files, settings, templates = _read_files(folder)
    limit = settings.get("model_max_length")
    if positions is not None and isinstance(limit, int | float):
        settings["model_max_length"] = max(limit, positions)
    if "default" in templates:
        files[TEMPLATE] = templates.pop("default").encode()
    if templates:
        settings["chat_template"] = _list_templates(templates)
    ids = {name: config[name] for name in IDS if config.get(name) is not None}
    return {GENERATION: _json(ids)} | files | {SETTINGS: _json(settings)}


def restore_files(folder: Path) -> dict[str, bytes]:
    """The files of an export, from the tokenizer's folder of a run; none if none were carried.

    Raises:
      UsageError: one of them is damaged.
    """
    if not (folder / SETTINGS).is_file():
        return {}
    files, settings, templates = _read_files(folder)
    if [*templates] == ["default"]:
        settings["chat_template"] = templates["default"]
        files[TEMPLATE] = templates["default"].encode()
    elif templates:
        settings["chat_template"] = _list_templates(templates)
    return files | {SETTINGS: _json(settings)}


def _read_files(folder: Path) -> tuple[dict[str, bytes], dict[str, Any], dict[str, str]]:
    """Files of a tokenizer, its settings, and the chat templates by name; files of their own take precedence."""
    settings = read_object(folder / SETTINGS)
    files = {name: (folder / name).read_bytes() for name in UNREAD if (folder / name).is_file()}
    if (folder / GENERATION).is_file():
        files[GENERATION] = _json(read_object(folder / GENERATION))
    listed = settings.pop("chat_template", None) or []
    with convert_errors(
        f"{folder / SETTINGS}: chat_template is neither text nor a list of templates with name and template",
        "restore the file",
    ):
        listed = [{"name": "default", "template": listed}] if isinstance(listed, str) else listed
        templates = {one["name"] + "": one["template"] + "" for one in listed}
    with convert_errors(f"{folder} has a chat template that is not UTF-8", "download it again"):
        for file in (folder / TEMPLATE, *sorted((folder / NAMED).glob("*.jinja"))):
            if file.is_file():
                templates["default" if file.name == TEMPLATE else file.stem] = file.read_bytes().decode()
    return files, settings, templates


def _list_templates(templates: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "template": template} for name, template in templates.items()]


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
