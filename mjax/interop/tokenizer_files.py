"""The tokenizer of a model, between a run folder and a Hugging Face model folder.

An export contains the files it was made from and `mjax_tokenizer.json`, so that an import restores it. For
`transformers.AutoTokenizer` it has a tokenizer.json with the same ids (`fast_tokenizer.py`).

BERT's is a vocab.txt and a flag for capitals; newer folders have both in a tokenizer.json. A tokenizer that only
resembles BERT's, with other rules for accents or with added tokens, is opened by its tokenizer.json or not at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from mjax.config.model import ModelConfig
from mjax.data.tokenizer_trial import remember
from mjax.data.tokenizers import (
    DESCRIPTION,
    BertTokenizer,
    CasedBertTokenizer,
    GPT2Tokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    UncasedBertTokenizer,
    load_tokenizer,
    tokenizer_from_folder,
)
from mjax.data.tokenizers.bert import LONGEST_WORD, SPECIAL
from mjax.data.tokenizers.huggingface import open_library
from mjax.errors import UsageError
from mjax.interop.model_folder import read_object, write_object

ADDED = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""Settings of an added token."""
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"


def find_tokenizer(folder: Path, given: str | None) -> Tokenizer | None:
    """The tokenizer `given` as in `mjax prepare --tokenizer`, or that of a model folder, with the token that begins its
    texts; None: it has none.

    Raises:
      UsageError: its files are damaged.
    """
    if given is not None:
        return load_tokenizer(given)
    if (folder / DESCRIPTION).is_file():
        return tokenizer_from_folder(folder)
    if (bert := _find_bert(folder)) is not None:
        return bert
    settings = read_object(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    if (folder / "tokenizer.json").is_file():
        tokenizer = _find_fast(folder, settings)
        tokenizer.bos = tokenizer.bos_of_files()
        return tokenizer
    for kind in (GPT2Tokenizer, SentencePieceTokenizer):
        files = [folder / name for name in kind.stored]
        if not all(file.is_file() for file in files):
            continue
        name = str(settings.get("tokenizer_class") or "GPT2Tokenizer")
        if kind is GPT2Tokenizer and name.removesuffix("Fast") != "GPT2Tokenizer":
            raise UsageError(
                f"{folder} has vocab.json and merges.txt of a {name}, which cuts text into words otherwise than GPT-2 "
                "does; add its tokenizer.json, which save_pretrained of transformers writes"
            )
        tokenizer = kind(*(file.read_bytes() for file in files), *map(str, files))
        if settings.get("add_bos_token") is True:  # if no tokenizer.json has it
            tokenizer.bos = tokenizer.bos_of_files()
        return tokenizer
    return None


def _find_fast(folder: Path, settings: dict[str, Any]) -> HuggingFaceTokenizer:
    """Read tokenizer.json, with the tokens that only tokenizer_config.json has, and its end token."""
    file, source = folder / "tokenizer.json", folder / SETTINGS
    content, added = file.read_bytes(), settings.get("added_tokens_decoder") or {}
    library = open_library(content, str(file))
    try:
        listed = sorted((int(number), {**token}) for number, token in added.items())
        tokens = [
            (number, AddedToken(**{name: token[name] for name in ADDED if name in token}))
            for number, token in listed
            if library.token_to_id(token["content"]) is None
        ]
    except (TypeError, ValueError, AttributeError, KeyError):
        raise UsageError(f"{source}: added_tokens_decoder does not describe tokens; restore the file") from None
    for number, token in tokens:
        (library.add_special_tokens if token.special else library.add_tokens)([token])
        if library.token_to_id(token.content) != number:
            raise UsageError(
                f"{source} gives {token.content} the id {number}, where {file} has "
                f"{library.token_to_id(token.content)} for the next one; save the tokenizer again with save_pretrained "
                "of transformers"
            )
    end = settings.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    if end not in [token.content for token in library.get_added_tokens_decoder().values()]:
        end = None
    return HuggingFaceTokenizer(library.to_str().encode() if tokens else content, str(file), end)


def _find_bert(folder: Path) -> BertTokenizer | None:
    """The WordPiece tokenizer of a model folder: from tokenizer.json if it exists, else from vocab.txt."""
    whole, pieces, said = (folder / name for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json"))
    if whole.is_file():
        try:
            # Omitted settings are filled in.
            values = json.loads(open_library(whole.read_bytes(), str(whole)).to_str())
        except UsageError:  # it is damaged; the next reader reports it
            return None
        vocab, lowercase = _pieces(values), _says_lowercase(values["normalizer"], "lowercase", "handle_chinese_chars")
        name = whole
    elif pieces.is_file() and said.is_file():
        vocab, name = pieces.read_bytes(), pieces
        lowercase = _says_lowercase(read_object(said), "do_lower_case", "tokenize_chinese_chars")
    else:
        return None
    if vocab is None or lowercase is None:
        return None
    return (UncasedBertTokenizer if lowercase else CasedBertTokenizer)(vocab, str(name))


def _says_lowercase(values: Any, lowercase: str, chinese: str) -> bool | None:
    """Whether words are lower-cased; None if unknown, or if accents or Chinese are handled differently from BERT."""
    small = values.get(lowercase) if isinstance(values, dict) else None
    usual = (
        isinstance(small, bool) and values.get("strip_accents") in (None, small) and values.get(chinese) is not False
    )
    return small if usual else None


def _pieces(values: dict[str, Any]) -> bytes | None:
    """The vocab.txt in a tokenizer.json; None if it describes another tokenizer than BERT's."""
    model = values["model"]
    described = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    described |= {"max_input_chars_per_word": LONGEST_WORD}
    if values["pre_tokenizer"] != {"type": "BertPreTokenizer"} or any(
        model.get(name) != value for name, value in described.items()
    ):
        return None
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    added = {token["content"]: token["id"] for token in values["added_tokens"]}
    in_order = [model["vocab"][piece] for piece in pieces] == list(range(len(pieces)))
    if not in_order or not added.items() <= model["vocab"].items():
        return None
    return "".join(f"{piece}\n" for piece in pieces).encode()


def write_tokenizer(tokenizer: Tokenizer, library: Library, folder: Path, model: ModelConfig) -> None:
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
    if isinstance(tokenizer, HuggingFaceTokenizer):  # whose own file has that name
        remember(content, "tokenizers")  # it has been compared with the tried one
        bos, tokenizer = tokenizer.bos, HuggingFaceTokenizer(content, "tokenizer.json", tokenizer.eod)
        tokenizer.bos = bos
    tokenizer.save(folder)
    (folder / "tokenizer.json").write_bytes(content)
    end, begin = library.id_to_token(tokenizer.eod), library.id_to_token(tokenizer.start)
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": not pairs,
        "model_input_names": ["input_ids", *(["token_type_ids"] if pairs else []), "attention_mask"],
    }
    if isinstance(tokenizer, BertTokenizer):
        values |= {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
        values |= {"do_lower_case": tokenizer.lowercase, "tokenize_chinese_chars": True, "strip_accents": None}
    if not pairs:
        values |= {"bos_token": begin, "eos_token": end}
    write_object(folder / "tokenizer_config.json", values)


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


def carried_files(folder: Path, config: dict[str, Any], positions: int | None = None) -> dict[str, bytes]:
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
    settings = read_object(folder / SETTINGS)
    limit = settings.get("model_max_length")
    if positions is not None and isinstance(limit, int | float):
        settings["model_max_length"] = max(limit, positions)
    templates = _files(folder) or _setting(folder, settings)
    default = templates.pop("default", None)
    if templates:
        settings["chat_template"] = _listed(templates)
    generation = {name: config[name] for name in IDS if config.get(name) is not None}
    if (folder / GENERATION).is_file():
        generation = read_object(folder / GENERATION)
    files = _unread(folder) | {SETTINGS: _json(settings), GENERATION: _json(generation)}
    return files | ({TEMPLATE: default.encode()} if default is not None else {})


def restored_files(folder: Path) -> dict[str, bytes]:
    """The files of an export, from the tokenizer's folder of a run; none if none were carried.

    Raises:
      UsageError: one of them is damaged.
    """
    if not (folder / SETTINGS).is_file():
        return {}
    files, settings = _unread(folder), read_object(folder / SETTINGS)
    templates = _setting(folder, settings) | _files(folder)
    if [*templates] == ["default"]:
        settings["chat_template"] = templates["default"]
        files[TEMPLATE] = templates["default"].encode()
    elif templates:
        settings["chat_template"] = _listed(templates)
    if (folder / GENERATION).is_file():
        files[GENERATION] = _json(read_object(folder / GENERATION))
    return files | {SETTINGS: _json(settings)}


def _unread(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in UNREAD if (folder / name).is_file()}


def _setting(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The chat templates in tokenizer_config.json, by name; taken out of it."""
    setting = settings.pop("chat_template", None) or []
    if isinstance(setting, str):
        return {"default": setting}
    if not isinstance(setting, list) or not all(
        isinstance(each, dict) and all(isinstance(each.get(name), str) for name in ("name", "template"))
        for each in setting
    ):
        raise UsageError(
            f"{folder / SETTINGS}: chat_template is neither text nor a list of templates with name and template; "
            "restore the file"
        )
    return {each["name"]: each["template"] for each in setting}


def _files(folder: Path) -> dict[str, str]:
    """The chat templates in files of their own, by name; `transformers` looks no further where there are any."""
    files = {file.stem: file for file in sorted((folder / NAMED).glob("*.jinja"))}
    if (folder / TEMPLATE).is_file():
        files["default"] = folder / TEMPLATE
    try:
        return {name: file.read_bytes().decode() for name, file in files.items()}
    except UnicodeDecodeError as error:
        raise UsageError(f"{folder} has a chat template that is not UTF-8 ({error}); download it again") from None


def _listed(templates: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "template": template} for name, template in templates.items()]


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
