"""Folders of Llamas that cannot be converted: one sentence each, and nothing is written."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mjax import cli
from tests.data.vocabularies import hf_byte_pairs
from tests.interop.folders import LLAMA, tensors_of, write_folder


def another_family(folder):
    change_config(folder, model_type="gemma3_text")


def unknown_positions(folder):
    change_config(folder, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})


def a_missing_shard(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()


def a_wrong_shape(folder):
    change_tensor(folder, lambda tensor: tensor[:, :-1].copy(), "k_proj")


def fewer_heads(folder):
    change_config(folder, num_key_value_heads=1)


def a_tokenizer_of_another_vocabulary(folder):
    hf_byte_pairs().save(str(folder / "tokenizer.json"))


def no_output_layer(folder):
    change_tensor(folder, None, "lm_head")


def not_finite(folder):
    change_tensor(folder, lambda tensor: tensor * np.float32("nan"), "gate_proj")


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensor(folder, change, part):
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        name = next((name for name in tensors if part in name), None)
        if name is not None:
            if change:
                tensors[name] = change(tensors[name])
            else:
                del tensors[name]
                index = folder / "model.safetensors.index.json"
                places = json.loads(index.read_text())
                del places["weight_map"][name]
                index.write_text(json.dumps(places))
            save_file(tensors, file)
            return


REFUSED = {
    another_family: "model_type is 'gemma3_text'; mjax supports gpt2",
    unknown_positions: "rope_type is 'longrope'; mjax knows default, linear, llama3, yarn",
    a_missing_shard: "model-00002-of-00003.safetensors does not exist, though model.safetensors.index.json names it",
    a_wrong_shape: "self_attn.k_proj.weight has shape (8, 15), and config.json asks for (8, 16)",
    fewer_heads: "_proj.weight has shape (8, 16), and config.json asks for (4, 16)",
    a_tokenizer_of_another_vocabulary: "the tokenizer has 330 ids and the model's embedding 257 rows",
    no_output_layer: "lacks the tensor lm_head.weight",
    not_finite: "gate_proj.weight holds numbers that are not finite",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_folder_that_cannot_be_converted_is_refused_in_one_sentence(change, tmp_path, capsys):
    folder = write_folder(tmp_path / "in", LLAMA, tensors_of(LLAMA), parts=3)
    change(folder)
    assert cli.main(["convert", "from-hf", str(folder), str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert REFUSED[change] in " ".join(said.split())
    assert said.count("mjax: error") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in"]
