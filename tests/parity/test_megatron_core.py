"""Models of megatron-core in checkpoints that it wrote: what they compute there they compute here."""

import shutil

import numpy as np
import pytest

from mjax import cli
from mjax.config import read_config
from mjax.interop.megatron.pickles import read_metadata
from tests.parity.megatron_written import convert, opened, scores_of, write_with_megatron_core
from tests.small import gradient_program

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")
pytest.importorskip("megatron.core", reason="megatron-core is not installed: make test-parity")

from tests.parity.write_megatron_core import MIXTURES  # noqa: E402

pytestmark = pytest.mark.parity

VOCABULARY = 29
FLAGS = ("--vocabulary", str(VOCABULARY))
CASES = {
    "one rank": {
        "gpt": ("stacked", "single", "torch"), "bert": ("stacked", "torch"), "llama": ("stacked", "apart", "torch"),
        "narrow": ("single",), "stretched": ("torch",), "mixtral": ("stacked", "single", "apart", "torch"),
        "before": ("stacked", "apart", "torch"), "deepseek": ("stacked", "torch"), "switch": ("torch",),
    },
    "two tensor ranks": {
        "gpt": ("single", "torch"), "bert": ("single", "torch"), "llama": ("single", "torch"), "narrow": ("torch",),
        "mixtral": ("stacked", "torch"), "before": ("torch",),
    },
    "two expert ranks": {"mixtral": ("stacked", "torch"), "before": ("stacked", "torch")},
}  # fmt: skip
"""By ranks and kind the layouts, of those that `write_megatron_core.py` writes."""
RANKS = {"one rank": {}, "two tensor ranks": {"ranks": 2}, "two expert ranks": {"ranks": 2, "expert_ranks": 2}}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A function: the folder of the checkpoints of so many ranks, written when it is first asked for."""
    folders = {}

    def folder(ranks):
        if ranks not in folders:
            folder = tmp_path_factory.mktemp("written")
            folders[ranks] = write_with_megatron_core(folder, *CASES[ranks], **RANKS[ranks])
        return folders[ranks]

    return folder


@pytest.mark.parametrize(
    ("ranks", "kind", "layout"),
    [(ranks, kind, layout) for ranks, kinds in CASES.items() for kind, layouts in kinds.items() for layout in layouts],
)
def test_scores_match_megatron_core(written, ranks, kind, layout, tmp_path):
    run = tmp_path / "run"
    assert convert(written(ranks) / f"{kind}_{layout}", run, *FLAGS) == 0
    theirs = np.load(written(ranks) / f"{kind}.npz")
    expected = theirs["scores"][..., :VOCABULARY]
    if kind != "bert":
        _, found = scores_of(run, theirs["ids"])
        np.testing.assert_allclose(found[..., :VOCABULARY], expected, atol=2e-5)
        return
    config, (words, order) = scores_of(run, theirs["ids"], theirs["types"], 1 - theirs["text"])
    text = theirs["text"] == 1
    assert (config.model.activation, config.model.mlm_activation) == ("gelu_tanh", "gelu_erf")
    np.testing.assert_allclose(words[..., :VOCABULARY][text], expected[text], atol=2e-5)
    np.testing.assert_allclose(order, theirs["order"], atol=2e-5)


@pytest.mark.parametrize("kind", MIXTURES)
def test_training_has_losses_and_gradients_of_megatron_core(written, kind, tmp_path):
    """Where the config has the coefficients of Megatron's arguments: cross entropy, auxiliary losses, and the gradients
    of all of them together in the routers."""
    folder, run = written("one rank"), tmp_path / "run"
    assert convert(folder / f"{kind}_torch", run) == 0  # all rows are tokens: Megatron's softmax has those of padding
    theirs, (config, weights) = np.load(folder / f"{kind}.npz"), opened(run)
    losses = {"balance_loss": ("load_balancing_loss", "seq_load_balancing_loss"), "z_loss": ("z_loss",)}
    losses = {name: its for name, its in losses.items() if getattr(config.model, name)}
    assert losses.keys() == {"mixtral": {"balance_loss", "z_loss"}, "deepseek": set()}.get(kind, {"balance_loss"})
    names = ("loss", "router_entropy", *losses, "expert_load")
    batch = {name: theirs[its].astype(np.int32) for name, its in (("tokens", "ids"), ("labels", "labels"))}
    found, gradients = gradient_program(config, names)[0](weights, batch, 0, 1.0)
    found = dict(zip(names, np.asarray(found).tolist(), strict=True))
    assert found["loss"] == pytest.approx(theirs["loss"].item(), rel=1e-5)
    for name, its in losses.items():
        (total,) = (theirs[each].item() for each in its if each in theirs)
        assert found[name] * config.model.layers == pytest.approx(total, rel=1e-5)
    ours = np.asarray(gradients.blocks.mlp.router.kernel[...]).swapaxes(1, 2)
    np.testing.assert_allclose(ours, theirs["routers"], atol=1e-5 * np.abs(theirs["routers"]).max())


@pytest.mark.parametrize(
    ("kind", "name"),
    [("llama", "Qwen3ForCausalLM"), ("stretched", "LlamaForCausalLM"), ("mixtral", "MixtralForCausalLM")],
)
def test_transformers_computes_the_same_with_export(written, kind, name, tmp_path):
    folder, run, out = written("one rank"), tmp_path / "run", tmp_path / "out"
    assert convert(folder / f"{kind}_torch", run, *FLAGS) == 0
    assert cli.main(["convert", "to-hf", str(run), str(out)]) == 0
    theirs, model = np.load(folder / f"{kind}.npz"), transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(model).__name__ == name
    with torch.no_grad():
        scores = model(torch.tensor(theirs["ids"])).logits.numpy()
    np.testing.assert_allclose(scores, theirs["scores"][..., :VOCABULARY], atol=2e-5)
    assert f"- converted by mjax from `{kind}_torch`, Megatron's " in (out / "README.md").read_text()


def test_rope_flag_lengthens_decoder(written, tmp_path, capsys):
    rope, folder = (*FLAGS, "--rope", "yarn:4"), written("one rank")
    assert convert(folder / "narrow_single", tmp_path / "run", *rope) == 0
    assert "--rope yarn:4, 40 positions instead of 10" in capsys.readouterr().out
    model = read_config(tmp_path / "run" / "config.json").model
    assert (model.sequence, model.rope_scaling, model.rope_factor, model.rope_original) == (40, "yarn", 4.0, 10)
    # Half of a head is turned, with biases: no class of transformers has both.
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    for kind, sentence in (("llama", "already has rotary positions with llama3:32"), ("gpt", "is a GPT without")):
        assert convert(folder / f"{kind}_torch", tmp_path / kind, *rope) == 2
        assert sentence in capsys.readouterr().err


def test_layouts_differ_and_truncated_part_is_named(written, tmp_path, capsys):
    stacked, single = (written("one rank") / f"gpt_{layout}" / "iter_0000005" for layout in ("stacked", "single"))
    assert read_metadata(stacked / ".metadata")["decoder.layers.mlp.linear_fc1.weight"].shape == (3, 40, 24)
    assert read_metadata(single / ".metadata")["decoder.layers.2.mlp.linear_fc1.weight"].shape == (40, 24)
    assert "optimizer.state.exp_avg.x" in read_metadata(stacked / ".metadata")
    source = shutil.copytree(stacked, tmp_path / "in")
    for file in source.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:2000])
    assert convert(source, tmp_path / "run") == 2
    assert "is truncated or damaged" in capsys.readouterr().err
