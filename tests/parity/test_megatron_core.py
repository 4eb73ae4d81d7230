"""Models of megatron-core in checkpoints that it wrote: what they compute there they compute here."""

import numpy as np
import pytest

from mjax.config import read_config
from tests.parity.megatron_written import convert, write_with_megatron_core
from tests.parity.peers import opened, scores_of
from tests.small import gradient_program, named

pytest.importorskip("torch", reason="torch is not installed: make test-ci")
pytest.importorskip("megatron.core", reason="megatron-core is not installed: make test-ci")

from tests.parity.write_megatron_core import MIXTURES

pytestmark = pytest.mark.parity


VOCABULARY = 29
FLAGS = ("--vocabulary", str(VOCABULARY))
CASES = {
    "one rank": {
        "gpt": ("stacked", "single", "torch"), "bert": ("stacked", "torch"), "llama": ("apart",), "narrow": ("single",),
        "mixtral": ("single", "apart", "torch"), "before": ("stacked", "torch"), "deepseek": ("torch",),
        "dense": ("torch",), "latent": ("stacked", "apart", "torch"), "latent_softmax": ("single",),
        "hybrid": ("single",), "hybrid_experts": ("apart",), "hybrid_both": ("single", "torch"),
    },
    "two tensor ranks": {"bert": ("single",), "llama": ("torch",), "narrow": ("torch",), "mixtral": ("stacked",),
                         "hybrid": ("torch",), "latent": ("single",)},
    "two expert ranks": {"mixtral": ("stacked",), "before": ("torch",)},
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


@pytest.mark.parametrize("kind", [kind for kind in MIXTURES if kind != "dense"])  # with the experts of deepseek
def test_training_has_losses_and_gradients_of_megatron_core(written, kind, tmp_path):
    """The config has the coefficients of Megatron's arguments: cross entropy, auxiliary losses, and the gradients
    of all of them together in the routers."""
    folder, run = written("one rank"), tmp_path / "run"
    assert convert(folder / f"{kind}_torch", run) == 0  # all rows are tokens: Megatron's softmax has those of padding
    theirs, (config, weights) = np.load(folder / f"{kind}.npz"), opened(run)
    losses = {"balance_loss": ("load_balancing_loss", "seq_load_balancing_loss"), "z_loss": ("z_loss",)}
    coefficients = {"balance_loss": config.model.aux_loss_coef, "z_loss": config.model.z_loss}
    losses = {name: its for name, its in losses.items() if coefficients[name]}
    expected = {"mixtral": {"balance_loss", "z_loss"}, "before": {"balance_loss"}}
    assert losses.keys() == expected.get(kind, set())
    names = ("loss", "router_entropy", *losses, "expert_load", *(["mtp_loss"] if "mtp_loss" in theirs else []))
    batch = {name: theirs[its].astype(np.int32) for name, its in (("tokens", "ids"), ("labels", "labels"))}
    found, gradients = gradient_program(config, names)[0](weights, batch, 0, 1.0)
    found = dict(zip(names, np.asarray(found).tolist(), strict=True))
    assert found["loss"] == pytest.approx(theirs["loss"].item(), rel=1e-5)
    for name, its in losses.items():
        (total,) = (theirs[each].item() for each in its if each in theirs)
        assert found[name] * config.model.layers == pytest.approx(total, rel=1e-5)
    if "mtp_loss" in theirs:
        assert found["mtp_loss"] == pytest.approx(theirs["mtp_loss"].item(), rel=1e-5)
    routers = [gradient for name, gradient in named(gradients).items() if name.endswith("router.kernel")]
    ours = np.concatenate([router.reshape(-1, *router.shape[-2:]) for router in routers]).swapaxes(1, 2)
    np.testing.assert_allclose(ours, theirs["routers"], atol=1e-5 * np.abs(theirs["routers"]).max())


def test_rope_flag_lengthens_decoder(written, tmp_path):
    assert convert(written("one rank") / "narrow_single", tmp_path / "run", *FLAGS, "--rope", "yarn:4") == 0
    model = read_config(tmp_path / "run" / "config.json").model
    assert (model.sequence, model.rope_scaling, model.rope_factor, model.rope_original_length) == (40, "yarn", 4.0, 10)
