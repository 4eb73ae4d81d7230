"""`mjax convert` against `transformers`: tokenizers of every kind that it exports, pickles that it reads, and positions
of a model that was trained further on shorter samples."""

import json

import numpy as np
import pytest

import mjax
from mjax.commands import cli
from mjax.config import read_config
from mjax.data.tokenizers import tokenizer_from_folder, train_sentencepiece
from tests.data.vocabularies import NAMES, NASTY, TEXTS, specs
from tests.interop.folders import CONFIG, LLAMA, read_folder, tensors_of, write_folder
from tests.parity.peers import imported

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
pytestmark = pytest.mark.parity


def _peer(vocabulary=101):
    config = transformers.GPT2Config(n_layer=2, n_embd=12, n_head=3, n_positions=17, vocab_size=vocabulary)
    config.bos_token_id = config.eos_token_id = None
    return transformers.GPT2LMHeadModel(config)


# --- Tokenizers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Return the argument of --tokenizer by name; "trained" is the one that `mjax prepare` trains by default."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_sentencepiece(TEXTS, 380).save(folder / "trained")
    return specs(folder) | {"trained": f"sentencepiece:{folder}/trained/tokenizer.model"}


EXACT = [*(name for name in NAMES if name not in ("sentencepiece, unigram", "sentencepiece, as T5")), "trained"]


@pytest.mark.parametrize("kind", EXACT)
def test_exported_tokenizer_gives_same_tokens(kind, tokenizers, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    imported(_peer(400), tmp_path, "--tokenizer", tokenizers[kind])
    assert cli.main(["convert", "to-hf", str(run), str(out)]) == 0
    ours, theirs = tokenizer_from_folder(run / "tokenizer"), transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.eos_token_id == ours.eod
    assert (len(theirs), theirs.model_max_length) == (ours.vocabulary, 17)
    for text in [*TEXTS[:3], *NASTY.values()]:
        ids = ours.encode(text)
        inputs = theirs(text)
        assert sorted(inputs) == ["attention_mask", "input_ids"], "GPT-2 would take token types for tokens"
        assert inputs["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids)


# --- pytorch_model.bin ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True], ids=["an archive", "torch before 1.6"])
def test_pickle_is_read_on_request(legacy, tmp_path):
    peer = _peer()
    state = peer.state_dict()
    peer.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "hf" / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    assert cli.main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "run"), "--allow-pickle"]) == 0
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    for name, tensor in read_folder(tmp_path / "out").items():
        assert np.array_equal(tensor, state[name].numpy()), name


# --- Shorter samples --------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "rope_theta": 10000.0}
TRAIN = """--model.sequence 8 --data.mock --mesh.data 16 --train.global-batch 16 --train.micro-batch 1 --train.steps 2
--train.eval-interval 0 --optimizer.warmup-steps 0 --optimizer.weight-decay 0"""


@pytest.mark.parametrize("config", [CONFIG, LLAMA | {"rope_parameters": YARN}], ids=["learned", "yarn"])
def test_shorter_samples_leave_positions_of_model(config, tmp_path, quick_runs):
    source, base, run, out = (tmp_path / name for name in ("in", "base", "run", "out"))
    write_folder(source, config, tensors_of(config))
    assert cli.main(["convert", "from-hf", str(source), str(base), "--tokenizer", "bytes"]) == 0
    model = read_config(base / "config.json").model
    assert (model.sequence, model.max_position_embeddings) == (16, 16)
    train = ["train", "--config", str(base / "config.json"), "--init", str(base), "--runs", str(tmp_path), "--name"]
    assert cli.main([*train, "run", *TRAIN.split()]) == 0
    assert read_config(run / "config.json").model.sequence == 8
    assert cli.main(["convert", "to-hf", str(run), str(out)]) == 0

    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    length = "n_positions" if config is CONFIG else "max_position_embeddings"
    assert after[length] == before[length] == 16
    assert config.get("rope_parameters", {}).items() <= after.get("rope_parameters", {}).items()
    assert transformers.AutoTokenizer.from_pretrained(out).model_max_length == 16
    if config is CONFIG:
        tables = [read_folder(folder)["transformer.wpe.weight"] for folder in (source, out)]
        np.testing.assert_array_equal(*(table[8:] for table in tables))
        assert np.abs(tables[0][:8] - tables[1][:8]).min(1).max() > 0

    peer = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert peer.config.max_position_embeddings == 16
    ids = np.random.default_rng(0).integers(0, 257, (2, 16))
    with torch.no_grad():
        expected = peer(torch.tensor(ids)).logits.numpy()
    found = np.stack(mjax.logits(run, ids.tolist(), compute="fp32"))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
