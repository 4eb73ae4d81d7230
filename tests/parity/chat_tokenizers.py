"""Small tokenizers with the rules of published chat models, and chat templates in each spelling."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.data.vocabularies import LLAMA, TEXTS, foreign_model

# As in the tokenizer.json of Llama 3 and of Qwen 2.5; they differ in how many digits make a word.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {"llama 3": CONTRACTIONS + r"\p{N}{1,3}" + REST, "qwen": CONTRACTIONS + r"\p{N}" + REST}
SPECIAL = {
    "llama 3": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OTHER = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
SPELLINGS = {
    "a file": {"file": TEMPLATE},
    "a setting": {"setting": TEMPLATE},
    "a list": {"setting": [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": OTHER}]},
    "files": {"file": TEMPLATE, "rag": OTHER},
    "none": {},
}


def byte_pairs(kind: str) -> tokenizers.Tokenizer:
    """Byte pairs on the words of Llama 3 or Qwen; special tokens have the last ids."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama 3"))
    words = pre_tokenizers.Split(Regex(WORDS[kind]), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, "1968 2001 12345 it's IT'S"], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL[kind]])
    if kind == "llama 3":
        first = SPECIAL[kind][0]
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{first} $A", f"{first} $A {first}:1 $B:1", [(first, tokenizer.token_to_id(first))]
        )
    return tokenizer


def write_tokenizer(kind: str, spelling: str, folder: Path) -> int:
    """The tokenizer's files of a model folder as published ones have them; the number of its ids.

    Args:
      kind: `llama 3` or `qwen` (a tokenizer.json), `sentencepiece` (a tokenizer.model, of Llama's kind).
      spelling: of the chat template, one of SPELLINGS.
      folder: exists.
    """
    settings = {"model_max_length": 24, "clean_up_tokenization_spaces": False}
    if kind == "sentencepiece":
        (folder / "tokenizer.model").write_bytes(foreign_model(**LLAMA))
        settings |= {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        settings |= {"add_bos_token": True, "add_eos_token": False, "legacy": False}
        ids = {"bos_token_id": 1, "eos_token_id": 2}
        vocabulary = LLAMA["vocab_size"]
    else:
        library = byte_pairs(kind)
        library.save(str(folder / "tokenizer.json"))
        one, two, three = SPECIAL[kind]
        bos, eos = (one, three) if kind == "llama 3" else (None, three)
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast" if kind == "llama 3" else "Qwen2Tokenizer"}
        settings |= {"bos_token": bos, "eos_token": eos, "pad_token": two if kind == "llama 3" else one}
        tokens = {"eos_token": eos, "pad_token": settings["pad_token"]} | ({"bos_token": bos} if bos else {})
        (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
        ends = [library.token_to_id(token) for token in (eos, settings["pad_token"])]
        ids = {"eos_token_id": ends, "pad_token_id": ends[1], "temperature": 0.6, "do_sample": True}
        vocabulary = library.get_vocab_size()
    (folder / "generation_config.json").write_text(json.dumps(ids))
    parts = SPELLINGS[spelling]
    if "setting" in parts:
        settings["chat_template"] = parts["setting"]
    if "file" in parts:
        (folder / "chat_template.jinja").write_text(parts["file"])
    if "rag" in parts:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text(parts["rag"])
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return vocabulary
