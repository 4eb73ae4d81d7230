"""The tokenizer of a model, between a run folder and a Hugging Face model folder.

An export contains the source files and `mjax_tokenizer.json`, so that an import restores the tokenizer. For
`transformers.AutoTokenizer` it has an equivalent tokenizer.json with the same ids. GPT-2's, BERT's and Hugging Face's
tokenizers run on the package `tokenizers` in mjax too. Bytes are BPE without merges. The package sentencepiece joins
the neighbors whose piece has the best score, `tokenizers` the pair that was learned first. So every two pieces that
form a third are exported as a pair, in the order of the third's score. Spaces become "▁", and one is added in front.

Not every tokenizer has an exact equivalent, so ids and text of the two are compared before a file is written.
"""

import json
import math
import random
from copy import copy
from operator import itemgetter
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as BackendTokenizer

from mjax.config.model import ModelConfig
from mjax.data.tokenizer_trial import SAMPLE_TEXT, mark_trusted
from mjax.data.tokenizers import (
    DESCRIPTION_FILE,
    EOD_PIECE,
    SCHEMES,
    SPACE,
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
    prepend_token,
    tokenizer_from_folder,
)
from mjax.errors import UsageError
from mjax.interop.model_folder import read_object, to_json, write_object

ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""Arguments of `AddedToken`."""
TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"


EXPORT_FIX = "export the weights alone with --tokenizer none"
DIFFICULT_TEXTS = (
    SAMPLE_TEXT,
    "  naïve café, e\u0301 s\u0323\u0307 ﬁ\u0301 Ⅷ ① ½ İ ẞ 漢字、한국어 हिन्दी ภาษาไทย مرحبا 👩‍👩‍👧🇫🇷",
    "\u00a0no\u3000break\u200b\u2028\ufeff",
    f"a\x00\x01\x7f {SPACE}Ġ <s>a</s> <unk><0x0A><pad> [CLS] [MASK] [SEP] {EOD_PIECE}one",
    " ",
)
"""Texts that tokenizers often encode differently."""


def open_tokenizer(folder: Path, spec: str | None) -> Tokenizer | None:
    """Open the tokenizer of a model folder, with its `bos`; None if the folder has no tokenizer.

    Args:
      folder: of the model.
      spec: another tokenizer, as in `mjax prepare --tokenizer`.

    Raises:
      UsageError: its files are damaged.
    """
    if spec is not None:
        return load_tokenizer(spec)
    if (folder / DESCRIPTION_FILE).is_file():
        return tokenizer_from_folder(folder)
    settings = read_object(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    if (folder / "tokenizer.json").is_file():
        tokenizer = _read_tokenizer_json(folder, settings)
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
            raise UsageError(f"{folder} has a {name} vocab.json, which splits words differently from GPT-2; {fix}")
        tokenizer = parse_tokenizer(kind, [file.read_bytes() for file in files], [*map(str, files)])
        if settings.get("add_bos_token") is True:  # if no tokenizer.json has it
            tokenizer.bos = tokenizer.find_bos()
        return tokenizer
    return None


def _read_tokenizer_json(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    """Read tokenizer.json, with the tokens that only tokenizer_config.json has, and its `eos_token`."""
    file, source = folder / "tokenizer.json", folder / TOKENIZER_CONFIG
    content, added = file.read_bytes(), settings.get("added_tokens_decoder") or {}
    backend = open_backend(content, str(file))
    with convert_errors(f"{source}: added_tokens_decoder does not describe tokens", "restore the file"):
        tokens = [
            (number, AddedToken(**{name: token[name] for name in ADDED_TOKEN_FIELDS if name in token}))
            for number, token in sorted(((int(key), token) for key, token in added.items()), key=itemgetter(0))
            if backend.token_to_id(token["content"]) is None
        ]
    for number, token in tokens:
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != number:
            problem = f"where {file} has {backend.token_to_id(token.content)} for the next one"
            raise UsageError(f"{source} gives {token.content} the id {number}, {problem}; save it again")
    eos = settings.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos not in [token.content for token in backend.get_added_tokens_decoder().values()]:
        eos = None
    return parse_tokenizer("hf", [backend.to_str().encode() if tokens else content], [str(file)], eos)


def write_tokenizer(tokenizer: Tokenizer, backend: BackendTokenizer, folder: Path, model: ModelConfig) -> None:
    """Write a tokenizer into a model folder: its files, for mjax, and a tokenizer.json, for `transformers`.

    Args:
      tokenizer: the tokenizer.
      backend: the result of `to_fast_tokenizer`.
      folder: the model folder.
      model: the exported model. A GPT's tokenizer adds at most `bos` to a text and matches no special token in it, as
        in mjax. A BERT's adds [CLS] and [SEP] and matches [MASK] in a text, as users of BERTs expect.
    """
    pairs = model.samples != "text"
    content = backend.to_str(pretty=True).encode()
    if tokenizer.scheme == "hf":  # its file has the same name
        mark_trusted(content, "tokenizers")  # it has been compared with a trusted one
        tokenizer = copy(tokenizer)
        tokenizer.contents = (content,)
    tokenizer.save(folder)
    (folder / "tokenizer.json").write_bytes(content)
    end, begin = backend.id_to_token(tokenizer.eod), backend.id_to_token(tokenizer.prefix_id)
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": not pairs,
        "model_input_names": ["input_ids", *(["token_type_ids"] if pairs else []), "attention_mask"],
    }
    if isinstance(tokenizer, BertTokenizer):
        values |= {f"{token.strip('[]').lower()}_token": token for token in BertTokenizer.special}
        if isinstance(normalizer := backend.normalizer, normalizers.BertNormalizer):
            values |= {"do_lower_case": normalizer.lowercase, "tokenize_chinese_chars": True, "strip_accents": None}
    if not pairs:
        values |= {"bos_token": begin, "eos_token": end}
    write_object(folder / "tokenizer_config.json", values)


# --- The same ids in tokenizer.json -----------------------------------------------------------------------------------


def to_fast_tokenizer(tokenizer: Tokenizer, pairs: bool = False) -> BackendTokenizer:
    """Convert a tokenizer to the package `tokenizers`, with the special tokens that `transformers` expects.

    Args:
      tokenizer: any kind.
      pairs: True to add [CLS] and [SEP] around texts, as for a BERT; else at most `bos` is added.

    Raises:
      UsageError: the result has other ids or text; the message shows the difference.
    """
    if isinstance(tokenizer, SentencePieceTokenizer):
        backend = _convert_sentencepiece(tokenizer.processor)
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        values = json.loads(tokenizer.backend.to_str())
        if not (pairs and isinstance(tokenizer, BertTokenizer)):
            values["post_processor"] = None  # the model was not trained with its tokens
        backend = BackendTokenizer.from_str(json.dumps(values))
    else:
        pieces = {piece: byte for byte, piece in enumerate([*bytes_to_unicode(), EOD_PIECE])}
        backend = byte_level_bpe(pieces, [], words=False)
    _check_equivalent(tokenizer, backend)
    if tokenizer.bos is not None:
        backend.post_processor = prepend_token(backend.id_to_token(tokenizer.bos), tokenizer.bos)
    return backend


def _check_equivalent(tokenizer: Tokenizer, backend: BackendTokenizer) -> None:
    """Compare the two on difficult texts and on every piece; the second is used as in `transformers`."""
    backend = BackendTokenizer.from_str(backend.to_str())  # as read from the file
    backend.encode_special_tokens = True
    for text in _comparison_texts(tokenizer):
        ids, exported_ids = tokenizer.encode(text), backend.encode(text, add_special_tokens=False).ids
        if ids == exported_ids and tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=False):
            continue
        same = next((i for i, (one, two) in enumerate(zip(ids, exported_ids, strict=False)) if one != two), 0)
        problem = f"{tokenizer.decode(ids[same:])[:40]!r} has other ids or another text there"
        raise UsageError(f"the {tokenizer.scheme} tokenizer has no equal in transformers: {problem}; {EXPORT_FIX}")


def _comparison_texts(tokenizer: Tokenizer) -> list[str]:
    """Difficult texts; all pieces in random order, always the same; and both mixed, with runs of spaces."""
    draw = random.Random(0)
    ids = [number for number in range(tokenizer.vocabulary) if number != tokenizer.eod]
    draw.shuffle(ids)
    pieces = [tokenizer.decode(ids[start : start + 100]) for start in range(0, len(ids), 100)]
    characters = "".join(DIFFICULT_TEXTS)
    mixed = []
    for _ in range(200):
        parts = [tokenizer.decode([draw.choice(ids)]) for _ in range(20)]
        parts += [*draw.choices(characters, k=20), " " * draw.randint(1, 20)]
        draw.shuffle(parts)
        mixed.append("".join(parts))
    return [*DIFFICULT_TEXTS, *pieces, *mixed]


# --- sentencepiece ----------------------------------------------------------------------------------------------------


def _convert_sentencepiece(processor: SentencePieceProcessor) -> BackendTokenizer:
    """Convert a BPE model without normalization; others fail `_check_equivalent`."""
    ids = {processor.id_to_piece(number): number for number in range(processor.vocab_size())}
    special = [piece for piece, number in ids.items() if processor.is_control(number) or processor.is_unknown(number)]
    byte_pieces = [piece for piece, number in ids.items() if processor.is_byte(number)]
    scores = {piece: processor.get_score(ids[piece]) for piece in ids if piece not in {*special, *byte_pieces}}
    # The trainer scores learned pieces -0.0, -1.0, …
    user_defined = {piece for piece, score in scores.items() if score == 0 and math.copysign(1, score) > 0}
    learned = {piece: score for piece, score in scores.items() if piece not in user_defined}

    unknown = processor.id_to_piece(processor.unk_id())
    prefix = processor.encode("a", out_type=str)[0].startswith(SPACE)
    backend = BackendTokenizer(_to_bpe(ids, learned, unknown, bool(byte_pieces)))
    backend.normalizer = normalizers.Sequence([normalizers.Replace(" ", SPACE), *[normalizers.Prepend(SPACE)] * prefix])
    steps = [decoders.Replace(unknown, processor.decode([processor.unk_id()])), decoders.Replace(SPACE, " ")]
    steps += [decoders.ByteFallback(), decoders.Fuse(), *[decoders.Strip(" ", 1, 0)] * prefix]
    backend.decoder = decoders.Sequence(steps)
    add_special_tokens(backend, *special)
    # User-defined pieces are never split or joined; a character that is part of no learned piece is never joined.
    characters = set("".join(learned))
    matched = [text for text in scores if text in user_defined and (len(text) > 1 or text in characters)]
    backend.add_tokens([AddedToken(text, special=False, normalized=True) for text in matched])
    return backend


def _to_bpe(ids: dict[str, int], scores: dict[str, float], unknown: str, byte_fallback: bool) -> models.BPE:
    """Build a BPE model: every two pieces that form a third are a pair, ordered by the score of the third."""
    pairs = [
        (text[:cut], text[cut:])
        for text in sorted(scores, key=lambda text: (-scores[text], ids[text]))
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    return models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)


# --- Files that mjax copies from an import to an export ---------------------------------------------------------------
#
# In a run folder they are next to the tokenizer's files:
#
#     RUN/tokenizer/chat_template.jinja      the default chat template, from any of its locations
#     RUN/tokenizer/tokenizer_config.json    class and special tokens for `transformers`; other templates by name
#     RUN/tokenizer/generation_config.json   the ids that end a text, and the sampling settings
#     RUN/tokenizer/special_tokens_map.json, tokenizer.model, …   copies
#
# So `AutoTokenizer` has the same ids, special tokens and `apply_chat_template` for an export as for the source. A
# template is a separate file since transformers 4.43, and before that a setting `chat_template` of
# tokenizer_config.json, as text or as a list of named templates. Both are read and written. Several templates are
# written as a list only, because a file would hide the others.

CHAT_TEMPLATE, NAMED_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
COPIED_FILES = (
    *("special_tokens_map.json", "added_tokens.json", "tokenizer.json", "tokenizer.model"),
    *("vocab.json", "merges.txt"),
)
"""Files of a tokenizer that are copied unchanged."""
SPECIAL_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def collect_tokenizer_files(folder: Path, config: dict[str, Any], positions: int | None = None) -> dict[str, bytes]:
    """Files of a model folder for the tokenizer's folder of a run; none without a tokenizer_config.json.

    Args:
      folder: of the model.
      config: its config.json, with the ids that end a text if there is no generation_config.json.
      positions: minimum of `model_max_length`, at which `transformers` truncates texts; None: unchanged.

    Raises:
      UsageError: one of them is damaged.
    """
    if not (folder / TOKENIZER_CONFIG).is_file():
        return {}
    files, settings, templates = _read_files(folder)
    limit = settings.get("model_max_length")
    if positions is not None and isinstance(limit, int | float):
        settings["model_max_length"] = max(limit, positions)
    if "default" in templates:
        files[CHAT_TEMPLATE] = templates.pop("default").encode()
    if templates:
        settings["chat_template"] = _list_templates(templates)
    ids = {name: config[name] for name in SPECIAL_ID_FIELDS if config.get(name) is not None}
    return {GENERATION_CONFIG: to_json(ids)} | files | {TOKENIZER_CONFIG: to_json(settings)}


def export_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Files of an export from the tokenizer's folder of a run; none without a tokenizer_config.json.

    Raises:
      UsageError: one of them is damaged.
    """
    if not (folder / TOKENIZER_CONFIG).is_file():
        return {}
    files, settings, templates = _read_files(folder)
    if [*templates] == ["default"]:
        settings["chat_template"] = templates["default"]
        files[CHAT_TEMPLATE] = templates["default"].encode()
    elif templates:
        settings["chat_template"] = _list_templates(templates)
    return files | {TOKENIZER_CONFIG: to_json(settings)}


def _read_files(folder: Path) -> tuple[dict[str, bytes], dict[str, Any], dict[str, str]]:
    """Read files of a tokenizer, its settings, and the chat templates by name; separate files have priority."""
    settings = read_object(folder / TOKENIZER_CONFIG)
    files = {name: (folder / name).read_bytes() for name in COPIED_FILES if (folder / name).is_file()}
    if (folder / GENERATION_CONFIG).is_file():
        files[GENERATION_CONFIG] = to_json(read_object(folder / GENERATION_CONFIG))
    value = settings.pop("chat_template", None) or []
    problem = "chat_template is neither text nor a list of templates with name and template"
    with convert_errors(f"{folder / TOKENIZER_CONFIG}: {problem}", "restore the file"):
        listed = [{"name": "default", "template": value}] if isinstance(value, str) else value
        templates = {item["name"] + "": item["template"] + "" for item in listed}
    with convert_errors(f"{folder} has a chat template that is not UTF-8", "download it again"):
        for file in (folder / CHAT_TEMPLATE, *sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))):
            if file.is_file():
                templates["default" if file.name == CHAT_TEMPLATE else file.stem] = file.read_bytes().decode()
    return files, settings, templates


def _list_templates(templates: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "template": template} for name, template in templates.items()]
