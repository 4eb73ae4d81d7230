"""`mjax convert` of BERT against `transformers`: BertForPreTraining, MegatronBertForPreTraining, and a published
model with both heads."""

import json
import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from mjax import cli
from mjax.config import MeshConfig
from mjax.data.tokenizers import load_tokenizer, tokenizer_from_folder
from mjax.interop.bert import BERT, MEGATRON_BERT
from tests.data.vocabularies import TEXTS, bert_file
from tests.interop.folders import read_folder
from tests.parity.megatron_written import opened
from tests.parity.peers import imported, perturbed, rate_of_megatron
from tests.parity.vocabularies import fetched
from tests.small import gradient_program, pairs_of

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
from tests.parity.both_ways import assert_gradients, assert_scores, exported  # noqa: E402
from tests.parity.outputs import outputs_of_pretraining  # noqa: E402
from tests.parity.trajectory import losses_of_both  # noqa: E402

pytestmark = pytest.mark.parity

FAMILIES = {"Bert": BERT, "MegatronBert": MEGATRON_BERT}
SHAPE = {
    "num_hidden_layers": 3, "hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 54,
    "vocab_size": 101, "max_position_embeddings": 17, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3,
}  # fmt: skip


def _peer(kind):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **SHAPE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
        pad_token_id=None,  # torch would give that row no gradient
        attn_implementation="eager",
    )
    return perturbed(getattr(transformers, f"{kind}ForPreTraining")(config).eval(), torch)


@pytest.mark.parametrize("kind", FAMILIES)
def test_model_comes_in_and_goes_out_the_same(kind, tmp_path):
    """Its scores, losses and gradients are those of transformers, which opens the export without a missing key."""
    peer = _peer(kind)
    config, weights = imported(peer, tmp_path)
    batch = pairs_of(config, 1)
    assert_scores(tmp_path / "run", peer, batch)
    expected = outputs_of_pretraining(peer, batch)
    program, _ = gradient_program(config)
    figures, gradients = program(weights, batch, jnp.int32(0), jnp.float32(1))
    expected.loss.backward()
    assert float(figures[0] + figures[1]) == pytest.approx(expected.loss.item(), rel=1e-5)
    assert_gradients(FAMILIES[kind], gradients, peer, config.model)
    again = exported(peer, tmp_path)
    with torch.no_grad():
        found = outputs_of_pretraining(again, batch)
    assert torch.equal(found.prediction_logits, expected.prediction_logits)
    assert torch.equal(found.seq_relationship_logits, expected.seq_relationship_logits)


def test_twenty_steps_from_import_follow_torch(tmp_path):
    peer = _peer("Bert")
    config, weights = imported(peer, tmp_path, "--vocabulary-multiple", "6")
    config = replace(config, mesh=MeshConfig(data=2, model=3))
    ours, theirs = losses_of_both(
        config,
        weights,
        peer,
        lambda peer, batch: outputs_of_pretraining(peer, batch).loss,
        lambda step: pairs_of(config, step % 4),
        rate_at=rate_of_megatron,
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert theirs[-1] < theirs[0] - 0.05, "the trajectory went nowhere"


# --- Tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowercase", [True, False], ids=["uncased", "cased"])
def test_tokenizers_of_both_open_in_the_other(lowercase, tmp_path):
    file = bert_file(tmp_path / "vocabulary", lowercase)
    ours = load_tokenizer(f"bert-{'uncased' if lowercase else 'cased'}:{file}")
    torch.manual_seed(0)
    config = transformers.BertConfig(**SHAPE | {"vocab_size": ours.vocabulary})
    transformers.BertForPreTraining(config).save_pretrained(tmp_path / "hf")
    transformers.BertTokenizer(vocab=str(file), do_lower_case=lowercase).save_pretrained(tmp_path / "hf")
    assert cli.main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    found = tokenizer_from_folder(tmp_path / "run" / "tokenizer")
    assert (found.scheme, found.mask) == (ours.scheme, ours.mask)
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
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
    assert "no tokenizer found" in capsys.readouterr().out, "nothing says whether its vocabulary is cased"

    config, _ = opened(run)
    assert (config.model.layers, config.model.hidden, config.model.vocabulary) == (12, 256, 591)
    peer = transformers.BertForPreTraining.from_pretrained(source, attn_implementation="eager").eval()
    assert_scores(run, peer, pairs_of(replace(config, model=replace(config.model, sequence=64)), 0))
    assert cli.main(["convert", "to-hf", str(run), str(tmp_path / "out")]) == 0
    state, exported = peer.state_dict(), read_folder(tmp_path / "out")
    for name, tensor in exported.items():
        assert np.array_equal(tensor, state[name].numpy()), name
