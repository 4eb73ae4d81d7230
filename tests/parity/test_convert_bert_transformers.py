"""`mjax convert` of BERT against `transformers`: its tokenizers, and a published model with both heads."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from mjax.commands import cli
from mjax.data.tokenizers import load_tokenizer, tokenizer_from_folder
from tests.data.vocabularies import TEXTS, bert_file
from tests.interop.folders import read_folder
from tests.parity.peers import opened
from tests.parity.vocabularies import fetched
from tests.small import pairs_of

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
from tests.parity.outputs import assert_scores  # noqa: E402

pytestmark = pytest.mark.parity

# --- Tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowercase", [True, False], ids=["uncased", "cased"])
def test_tokenizers_of_both_open_in_the_other(lowercase, tmp_path, capsys):
    file = bert_file(tmp_path / "vocabulary", lowercase)
    ours = load_tokenizer(f"bert-{'uncased' if lowercase else 'cased'}:{file}")
    shape = {"num_hidden_layers": 1, "hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 24}
    config = transformers.BertConfig(**shape, vocab_size=ours.vocabulary, max_position_embeddings=17)
    transformers.BertForPreTraining(config).save_pretrained(tmp_path / "hf")
    transformers.BertTokenizer(vocab=str(file), do_lower_case=lowercase).save_pretrained(tmp_path / "hf")
    assert cli.main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    assert f"--tokenizer run:{tmp_path}/run --split-sentences --no-append-eod\n" in capsys.readouterr().out
    found = tokenizer_from_folder(tmp_path / "run" / "tokenizer")
    assert (found.cls, found.mask) == (ours.cls, ours.mask)
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] == ours.pad
    assert (theirs.mask_token_id, theirs.pad_token_id) == (ours.mask, ours.pad)
    for text in [*TEXTS, "Ça va? ÉCOLE 漢字 don't"]:
        ids = ours.encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs(text)["input_ids"] == [ours.cls, *ids, ours.sep]
        assert found.encode(text) == ids
    assert theirs("a [MASK]")["input_ids"] == [ours.cls, *ours.encode("a"), ours.mask, ours.sep]  # for fill-mask


# --- A published model ------------------------------------------------------------------------------------------------


def test_published_bert_gives_same_scores(request, tmp_path, capsys):
    members = ["config.json", "pytorch_model.bin", "vocab.txt"]
    files = fetched(request.config.cache, "rxnfp", *(f"bert_pretrained/{member}" for member in members))
    source, run = tmp_path / "in", tmp_path / "run"
    shutil.copytree(files[0].parent, source)
    values = json.loads((source / "config.json").read_text())  # written before there was a model_type
    (source / "config.json").write_text(json.dumps(values | {"model_type": "bert"}))
    assert cli.main(["convert", "from-hf", str(source), str(run), "--allow-pickle"]) == 0
    assert f"no tokenizer in {source}" in capsys.readouterr().out, "nothing says whether its vocabulary is cased"

    config, _ = opened(run)
    assert (config.model.layers, config.model.hidden, config.model.vocabulary) == (12, 256, 591)
    peer = transformers.BertForPreTraining.from_pretrained(source, attn_implementation="eager").eval()
    assert_scores(run, peer, pairs_of(replace(config, model=replace(config.model, sequence=64)), 0))
    assert cli.main(["convert", "to-hf", str(run), str(tmp_path / "out")]) == 0
    state, exported = peer.state_dict(), read_folder(tmp_path / "out")
    for name, tensor in exported.items():
        assert np.array_equal(tensor, state[name].numpy()), name
