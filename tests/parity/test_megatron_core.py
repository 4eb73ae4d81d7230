"""Models of megatron-core in checkpoints that Megatron wrote: what they compute there they compute here."""

import subprocess
from itertools import product

import numpy as np
import pytest

from mjax import cli
from mjax.config import read_config
from mjax.interop.megatron.pickles import read_metadata
from tests.parity.megatron_written import scores_of, write_with_megatron_core
from tests.products import diagonal, seldom

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")
pytest.importorskip("megatron.core", reason="megatron-core is not installed: make test-parity")

from tests.parity.write_megatron_core import DECODERS  # noqa: E402

pytestmark = pytest.mark.parity

VOCABULARY = 29


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two tensor ranks"])
def written(request, tmp_path_factory):
    """The folder that `write_megatron_core` leaves."""
    return write_with_megatron_core(tmp_path_factory.mktemp("written"), ranks=request.param)


LAYOUTS = ("stacked", "single", "torch")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpt_has_the_logits_of_megatron_core(written, layout, tmp_path):
    source, run = written / f"gpt_{layout}", tmp_path / "run"
    assert cli.main(["convert", "from-megatron", str(source), str(run), "--vocabulary", str(VOCABULARY)]) == 0
    theirs = np.load(written / "gpt.npz")
    config, ours = scores_of(run, theirs["ids"])
    assert config.model.activation == "gelu_tanh"
    np.testing.assert_allclose(ours[..., :VOCABULARY], theirs["scores"][..., :VOCABULARY], atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*seldom(product(DECODERS, LAYOUTS), diagonal(2, DECODERS, LAYOUTS), some=()), ("llama", "apart")],
    ids=str,
)
def test_a_decoder_has_the_logits_of_megatron_core(written, kind, layout, tmp_path):
    source, run = written / f"{kind}_{layout}", tmp_path / "run"
    assert cli.main(["convert", "from-megatron", str(source), str(run), "--vocabulary", str(VOCABULARY)]) == 0
    theirs = np.load(written / f"{kind}.npz")
    _, ours = scores_of(run, theirs["ids"])
    np.testing.assert_allclose(ours[..., :VOCABULARY], theirs["scores"][..., :VOCABULARY], atol=2e-5)


def test_a_decoder_gets_longer_positions_with_rope_unless_it_has_them(written, tmp_path, capsys):
    argv = ["convert", "from-megatron", "", str(tmp_path / "run"), "--vocabulary", str(VOCABULARY), "--rope", "yarn:4"]
    assert cli.main([*argv[:2], str(written / "narrow_torch"), *argv[3:]]) == 0
    assert "--rope yarn:4, 40 positions instead of 10" in capsys.readouterr().out
    model = read_config(tmp_path / "run" / "config.json").model
    assert (model.sequence, model.rope_scaling, model.rope_factor, model.rope_original) == (40, "yarn", 4.0, 10)
    for kind, sentence in (("llama", "already has rotary positions with llama3:32"), ("gpt", "is a GPT without")):
        assert cli.main([*argv[:2], str(written / f"{kind}_torch"), str(tmp_path / kind), *argv[4:]]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("kind", DECODERS)
def test_transformers_computes_the_same_with_the_export_of_a_decoder(written, kind, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    flags = ["--vocabulary", str(VOCABULARY)]
    assert cli.main(["convert", "from-megatron", str(written / f"{kind}_torch"), str(run), *flags]) == 0
    if kind == "narrow":  # half of a head is turned, with biases: no class has both
        assert cli.main(["convert", "to-hf", str(run), str(out)]) == 2
        return
    assert cli.main(["convert", "to-hf", str(run), str(out)]) == 0
    theirs, model = np.load(written / f"{kind}.npz"), transformers.AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        scores = model(torch.tensor(theirs["ids"])).logits.numpy()
    np.testing.assert_allclose(scores, theirs["scores"][..., :VOCABULARY], atol=2e-5)
    assert f"- converted by mjax from `{kind}_torch`, Megatron's decoder\n" in (out / "README.md").read_text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bert_has_the_scores_of_megatron_core(written, layout, tmp_path):
    source, run = written / f"bert_{layout}", tmp_path / "run"
    assert cli.main(["convert", "from-megatron", str(source), str(run), "--vocabulary", str(VOCABULARY)]) == 0
    theirs = np.load(written / "bert.npz")
    text = theirs["text"] == 1
    config, (of_tokens, of_order) = scores_of(run, theirs["ids"], theirs["types"], 1 - theirs["text"])
    assert (config.model.activation, config.model.mlm_activation) == ("gelu_tanh", "gelu_erf")
    np.testing.assert_allclose(of_tokens[..., :VOCABULARY][text], theirs["scores"][..., :VOCABULARY][text], atol=2e-5)
    np.testing.assert_allclose(of_order, theirs["order"], atol=2e-5)


def test_the_gelus_of_a_bert_are_two(written, tmp_path):
    """Otherwise the test above would pass with one for both."""
    theirs, run = np.load(written / "bert.npz"), tmp_path / "run"
    assert cli.main(["convert", "from-megatron", str(written / "bert_torch"), str(run)]) == 0
    file = run / "config.json"
    file.write_text(file.read_text().replace('"mlm_activation": "gelu_erf"', '"mlm_activation": "gelu_tanh"'))
    _, (of_tokens, _) = scores_of(run, theirs["ids"], theirs["types"], 1 - theirs["text"])
    difference = np.abs(of_tokens[0, :, :VOCABULARY] - theirs["scores"][0, :, :VOCABULARY])
    assert difference.max() > 1e-4


def test_layers_are_one_tensor_or_many_as_the_names_say(written):
    """Otherwise the cases above would be one."""
    names = {
        layout: read_metadata(written / f"gpt_{layout}" / "iter_0000005" / ".metadata")
        for layout in ("stacked", "single")
    }
    assert names["stacked"]["decoder.layers.mlp.linear_fc1.weight"].shape == (3, 40, 24)
    assert names["single"]["decoder.layers.2.mlp.linear_fc1.weight"].shape == (40, 24)
    assert "optimizer.state.exp_avg.x" in names["stacked"]


def test_a_part_that_is_cut_off_is_named(written, tmp_path, capsys):
    source = tmp_path / "in"
    subprocess.run(["cp", "-r", str(written / "gpt_stacked" / "iter_0000005"), str(source)], check=True)
    for file in source.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:2000])
    assert cli.main(["convert", "from-megatron", str(source), str(tmp_path / "run")]) == 2
    assert "is truncated or damaged" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
