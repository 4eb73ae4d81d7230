"""Chat templates and what ends a text: where a run folder has them, and what is written of a changed one."""

import json
import shutil

import pytest

from mjax.config import Config, DataConfig
from mjax.data.sources import TrainingData
from mjax.data.tokenizers import load_tokenizer, tokenizer_from_folder
from mjax.errors import UsageError
from mjax.interop.carried_files import carried_files, restored_files
from mjax.interop.tokenizer_files import find_tokenizer
from mjax.training.beginning import write_folder, write_origin
from mjax.training.origin import Origin
from tests.data.vocabularies import gpt2_files


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


def test_a_template_changed_in_the_run_goes_out_in_both_spellings(tmp_path):
    source = folder_of(tmp_path / "in", {"eos_token": "</s>", "chat_template": "old"}, special_tokens_map__json="{}\n")
    run = stored(carried_files(source, {"eos_token_id": 7}), tmp_path / "run")
    assert (run / "chat_template.jinja").read_text() == "old"
    assert json.loads((run / "tokenizer_config.json").read_text()) == {"eos_token": "</s>"}
    assert json.loads((run / "generation_config.json").read_text()) == {"eos_token_id": 7}
    (run / "chat_template.jinja").write_text("new")
    out = restored_files(run)
    assert out["chat_template.jinja"] == b"new"
    assert json.loads(out["tokenizer_config.json"]) == {"eos_token": "</s>", "chat_template": "new"}
    assert out["special_tokens_map.json"] == b"{}\n"


def test_several_templates_go_out_as_one_list_that_no_file_hides(tmp_path):
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    run = stored(carried_files(folder_of(tmp_path / "in", {"chat_template": named}), {}), tmp_path / "run")
    assert (run / "chat_template.jinja").read_text() == "d"
    out = restored_files(run)
    assert "chat_template.jinja" not in out
    assert json.loads(out["tokenizer_config.json"])["chat_template"] == named


def test_a_file_hides_the_setting_as_in_transformers(tmp_path):
    source = folder_of(tmp_path / "in", {"chat_template": "setting"}, chat_template__jinja="file")
    assert carried_files(source, {})["chat_template.jinja"] == b"file"


def test_nothing_is_carried_without_settings_of_a_tokenizer(tmp_path):
    assert carried_files(folder_of(tmp_path / "in", None, chat_template__jinja="file"), {}) == {}
    assert restored_files(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    ("settings", "files", "said"),
    [
        ({"chat_template": 3}, {}, "neither text nor a list"),
        ({"chat_template": [{"name": "rag"}]}, {}, "neither text nor a list"),
        ([], {}, "has no JSON object"),
        ({}, {"chat_template__jinja": b"\xff"}, "not UTF-8"),
        ({}, {"generation_config__json": "{"}, "generation_config.json"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(settings, files, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        carried_files(folder_of(tmp_path / "in", settings, **files), {})
    with pytest.raises(UsageError, match=said):
        restored_files(tmp_path / "in")


def test_byte_pairs_that_are_not_cut_as_gpt2s_are_refused_without_a_tokenizer_json(tmp_path):
    source = folder_of(tmp_path / "in", {"tokenizer_class": "GPT2TokenizerFast"})
    gpt2_files(source)
    assert find_tokenizer(source, None).scheme == "gpt2"
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(UsageError, match="of a Qwen2Tokenizer"):
        find_tokenizer(source, None)


def test_another_tokenizer_of_the_data_replaces_that_of_a_run_with_its_template_in_one_line(tmp_path):
    files = ",".join(map(str, gpt2_files(tmp_path)))
    for name, spec in {"same": f"gpt2:{files}", "other": "bytes", "run/tokenizer": f"gpt2:{files}"}.items():
        load_tokenizer(spec).save(tmp_path / name)
    template, said = tmp_path / "run" / "tokenizer" / "chat_template.jinja", []
    template.write_text("hello")
    config = Config(data=DataConfig(mock=True))
    for name, kept in {"same": True, "other": False}.items():
        data = TrainingData(training=None, validation=None, tokenizer=tmp_path / name, summary="")
        write_folder(config, config, data, tmp_path / "run", said.append)
        assert template.exists() == kept
        assert len([line for line in said if "chat template" in line]) == (not kept)
    assert tokenizer_from_folder(tmp_path / "run" / "tokenizer").scheme == "bytes"


def test_a_run_that_starts_from_another_has_its_template_if_the_tokenizer_is_the_same(tmp_path):
    files = ",".join(map(str, gpt2_files(tmp_path)))
    for name, spec in {"same": f"gpt2:{files}", "other": "bytes", "run/tokenizer": f"gpt2:{files}"}.items():
        load_tokenizer(spec).save(tmp_path / name)
    (tmp_path / "run" / "tokenizer" / "chat_template.jinja").write_text("hello")
    origin, said = Origin(str(tmp_path / "run"), 0, {}), []
    for name, kept in {"same": True, "other": False}.items():
        new = tmp_path / f"new, {name}"
        shutil.copytree(tmp_path / name, new / "tokenizer")
        data = TrainingData(training=None, validation=None, tokenizer=tmp_path / name, summary="")
        write_origin(new, origin, data, said.append)
        assert (new / "tokenizer" / "chat_template.jinja").exists() == kept
        assert len(said) == (not kept)
