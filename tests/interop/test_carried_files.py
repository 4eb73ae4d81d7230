"""Chat templates and what ends a text: where a run folder has them, and what is written of a changed one."""

import json
import shutil
from dataclasses import replace

import pytest

from mjax.commands import cli
from mjax.config import Config, DataConfig, GPTConfig
from mjax.data.sources import TrainingData
from mjax.data.tokenizers import load_tokenizer, tokenizer_from_folder
from mjax.errors import UsageError
from mjax.generation.chat import Chat
from mjax.interop.convert import check_vocabulary
from mjax.interop.tokenizer_files import collect_tokenizer_files, export_tokenizer_files, open_tokenizer
from mjax.run.continuing import Origin
from mjax.run.start import write_folder, write_origin
from tests.data.vocabularies import gpt2_files
from tests.interop.folders import LLAMA, tensors_of
from tests.interop.folders import write_folder as write_model
from tests.parity.chat_tokenizers import write_tokenizer
from tests.test_chat import bytes_with_special_tokens


def folder_of(path, settings=None, **files):
    path.mkdir(parents=True)
    if settings is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        (path / name.replace("__", ".")).write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def stored(files, path):
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def test_changed_template_is_exported_in_both_spellings(tmp_path):
    source = folder_of(tmp_path / "in", {"eos_token": "</s>", "chat_template": "old"}, special_tokens_map__json="{}\n")
    run = stored(collect_tokenizer_files(source, {"eos_token_id": 7}), tmp_path / "run")
    assert (run / "chat_template.jinja").read_text() == "old"
    assert json.loads((run / "tokenizer_config.json").read_text()) == {"eos_token": "</s>"}
    assert json.loads((run / "generation_config.json").read_text()) == {"eos_token_id": 7}
    (run / "chat_template.jinja").write_text("new")
    out = export_tokenizer_files(run)
    assert out["chat_template.jinja"] == b"new"
    assert json.loads(out["tokenizer_config.json"]) == {"eos_token": "</s>", "chat_template": "new"}
    assert out["special_tokens_map.json"] == b"{}\n"


def test_template_file_takes_precedence_over_setting(tmp_path):
    source = folder_of(tmp_path / "in", {"chat_template": "setting"}, chat_template__jinja="file")
    assert collect_tokenizer_files(source, {})["chat_template.jinja"] == b"file"


@pytest.mark.parametrize(
    ("settings", "files", "message"),
    [
        ({"chat_template": [{"name": "rag"}]}, {}, "neither text nor a list"),
        ({}, {"chat_template__jinja": b"\xff"}, "not UTF-8"),
        ({}, {"generation_config__json": "{"}, "generation_config.json"),
    ],
)
def test_damaged_files_are_refused(settings, files, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        collect_tokenizer_files(folder_of(tmp_path / "in", settings, **files), {})
    with pytest.raises(UsageError, match=message):
        export_tokenizer_files(tmp_path / "in")


def test_byte_pairs_of_other_words_are_refused(tmp_path):
    source = folder_of(tmp_path / "in", {"tokenizer_class": "GPT2TokenizerFast"})
    gpt2_files(source)
    assert open_tokenizer(source, None).scheme == "gpt2"
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(UsageError, match="has a Qwen2Tokenizer"):
        open_tokenizer(source, None)


def test_settings_of_the_tokenizer_are_read(tmp_path):
    """Tokens that only they have, the end of a text, and one token more than the model has rows."""
    source = tmp_path / "in"
    source.mkdir()
    bytes_with_special_tokens().save(str(source / "tokenizer.json"))
    added = {"259": {"content": "<tool>", "special": True}, "260": {"content": "<plain>", "special": False}}
    settings = {"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": added}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    found = open_tokenizer(source, None)
    assert found.backend.id_to_token(found.eod) == "<|im_end|>"
    assert (found.vocabulary, found.backend.token_to_id("<tool>")) == (261, 259)
    found.save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("")
    assert 259 in Chat(tmp_path / "tokenizer").encode("a <tool> b")

    del added["260"]
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    found = open_tokenizer(source, None)
    assert check_vocabulary(found, replace(GPTConfig(), vocabulary=259)) == ["<tool>"]
    found.save(tmp_path / "fewer")
    assert tokenizer_from_folder(tmp_path / "fewer").vocabulary == 259
    with pytest.raises(UsageError, match="the tokenizer has 259 ids and the model's embedding 200 rows"):
        check_vocabulary(found, replace(GPTConfig(), vocabulary=200))

    added["270"] = {"content": "<far>", "special": True}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match=r"gives <far> the id 270, where .* has 260 for the next one"):
        open_tokenizer(source, None)


def test_run_keeps_template_only_with_its_tokenizer(tmp_path):
    """So does a run that starts from another run; each time one line says what is not kept."""
    files = ",".join(map(str, gpt2_files(tmp_path)))
    for name, spec in {"same": f"gpt2:{files}", "other": "bytes", "run/tokenizer": f"gpt2:{files}"}.items():
        load_tokenizer(spec).save(tmp_path / name)
    run, config, message = tmp_path / "run", Config(data=DataConfig(mock=True)), []
    template, origin = run / "tokenizer" / "chat_template.jinja", Origin(str(run), 0, {})
    template.write_text("hello")
    for name, kept in {"same": True, "other": False}.items():
        data = TrainingData(training=None, validation=None, tokenizer=tmp_path / name, summary="")
        new = tmp_path / f"new, {name}"
        shutil.copytree(tmp_path / name, new / "tokenizer")
        write_origin(new, origin, None, data, message.append)
        assert (new / "tokenizer" / "chat_template.jinja").exists() == kept
        write_folder(config, config, data, run, message.append)
        assert template.exists() == kept
        assert len(message) == (0 if kept else 2)
    assert tokenizer_from_folder(run / "tokenizer").scheme == "bytes"


def test_chat_model_survives_import_and_export(tmp_path):
    size = write_tokenizer("llama 3", "a file", folder_of(tmp_path / "of tokenizer"))
    config = LLAMA | {"vocab_size": size}
    source = write_model(tmp_path / "in", config, tensors_of(config))
    shutil.copytree(tmp_path / "of tokenizer", source, dirs_exist_ok=True)
    for command, given, output in (("from-hf", "in", "run"), ("to-hf", "run", "out")):
        assert cli.main(["convert", command, str(tmp_path / given), str(tmp_path / output)]) == 0
    for name in ("generation_config.json", "tokenizer.json", "special_tokens_map.json", "chat_template.jinja"):
        read = str if name.endswith("jinja") else json.loads
        assert read((tmp_path / "out" / name).read_text()) == read((source / name).read_text())
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["eos_token_id"] == json.loads((source / "generation_config.json").read_text())["eos_token_id"]
    (tmp_path / "run" / "tokenizer" / "generation_config.json").unlink()
    assert Chat(tmp_path / "run" / "tokenizer").stops == [size - 1], "the end of a document is eos_token"
