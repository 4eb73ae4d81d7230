"""Mixtures of experts of megatron-core in checkpoints that it wrote: scores, losses and the gradients of routers."""

from argparse import Namespace
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from mjax import cli
from mjax.config import DataConfig, PrecisionConfig, TrainConfig, read_config
from mjax.interop.convert import abstract_weights
from mjax.state.checkpoint import Checkpoints
from tests.interop.test_megatron_mixture import ARGUMENTS, check, share
from tests.parity.megatron_written import convert, scores_of, tensors_of, weights_of, write_with_megatron_core
from tests.small import gradient_program

torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-parity")
pytest.importorskip("megatron.core", reason="megatron-core is not installed: make test-parity")

from tests.parity.write_megatron_core import MIXTURES  # noqa: E402

pytestmark = pytest.mark.parity

VOCABULARY = 29
CASES = {
    "one rank": [
        *(("mixtral", layout) for layout in ("stacked", "single", "apart", "torch")),
        *(("before", layout) for layout in ("stacked", "apart", "torch")),
        *(("deepseek", layout) for layout in ("stacked", "torch")),
        ("switch", "torch"),
    ],
    "two tensor ranks": [(kind, layout) for kind in ("mixtral", "before") for layout in ("stacked", "torch")],
    "two expert ranks": [(kind, layout) for kind in ("mixtral", "before") for layout in ("stacked", "torch")],
}
RANKS = {"one rank": {}, "two tensor ranks": {"ranks": 2}, "two expert ranks": {"ranks": 2, "expert_ranks": 2}}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A function: the folder of the checkpoints of so many ranks, written when it is first asked for."""
    folders = {}

    def folder(ranks):
        if ranks not in folders:
            kinds = dict.fromkeys(kind for kind, _ in CASES[ranks])
            folders[ranks] = write_with_megatron_core(tmp_path_factory.mktemp("written"), *kinds, **RANKS[ranks])
        return folders[ranks]

    return folder


@pytest.mark.parametrize(
    ("ranks", "kind", "layout"), [(ranks, *case) for ranks, cases in CASES.items() for case in cases], ids=str
)
def test_a_mixture_has_the_logits_of_megatron_core(written, ranks, kind, layout, tmp_path):
    run = tmp_path / "run"
    assert convert(written(ranks) / f"{kind}_{layout}", run, "--vocabulary", str(VOCABULARY)) == 0
    theirs = np.load(written(ranks) / f"{kind}.npz")
    _, ours = scores_of(run, theirs["ids"])
    np.testing.assert_allclose(ours[..., :VOCABULARY], theirs["scores"][..., :VOCABULARY], atol=2e-5)


@pytest.mark.parametrize("kind", MIXTURES)
def test_training_goes_on_with_the_losses_and_gradients_of_megatron_core(written, kind, tmp_path):
    """Where the config has the coefficients of Megatron's arguments: cross entropy, auxiliary losses, and the gradients
    of all of them together in the routers."""
    folder, run = written("one rank"), tmp_path / "run"
    assert convert(folder / f"{kind}_torch", run) == 0  # all rows are tokens: Megatron's softmax has those of padding
    theirs, config = np.load(folder / f"{kind}.npz"), read_config(run / "config.json")
    config = replace(
        config,
        model=replace(config.model, attention="xla"),
        data=DataConfig(mock=True),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(global_batch=3, micro_batch=3),
    )
    with Checkpoints(run / "checkpoints") as checkpoints:
        _, weights = checkpoints.restore(abstract_weights(config), field="model")
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


def test_transformers_computes_the_same_with_the_export_of_a_mixture(written, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    folder = written("one rank")
    assert convert(folder / "mixtral_torch", run, "--vocabulary", str(VOCABULARY)) == 0
    assert cli.main(["convert", "to-hf", str(run), str(out)]) == 0
    theirs, model = np.load(folder / "mixtral.npz"), transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(model).__name__ == "MixtralForCausalLM"
    with torch.no_grad():
        scores = model(torch.tensor(theirs["ids"])).logits.numpy()
    np.testing.assert_allclose(scores, theirs["scores"][..., :VOCABULARY], atol=2e-5)


@pytest.mark.parametrize("layout", ["one by one", "grouped", "grouped, of old"])
def test_files_of_tensor_ranks_stages_and_expert_ranks_are_told_apart_by_their_numbers(layout, tmp_path, capsys):
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    said = ARGUMENTS | dict.fromkeys(sizes, 2) | {"expert_tensor_parallel_size": 2}
    said |= {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.01}
    for rank, stage, expert_rank in product(range(2), repeat=3):
        place = tmp_path / "in" / "release" / f"mp_rank_{rank:02}_{stage:03}_{expert_rank:03}"
        place.mkdir(parents=True)
        model = tensors_of(share(layout, stage, rank, 2, expert_rank, 2))
        content = {"model": model, "args": Namespace(**said), "checkpoint_version": 3.0}
        torch.save(content, place / "model_optim_rng.pt")
    assert convert(tmp_path / "in", tmp_path / "run") == 0
    assert "balance loss: mjax has no global_aux_loss 0.01, so the run has none" in capsys.readouterr().out
    weights = weights_of(tmp_path / "run")
    check(lambda name, first, end: weights[name][first:end])


def test_experts_that_are_split_over_other_tensor_ranks_than_the_rest_are_refused(tmp_path, capsys):
    said = ARGUMENTS | {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    for rank in range(2):
        place = tmp_path / "in" / "release" / f"mp_rank_{rank:02}"
        place.mkdir(parents=True)
        content = {"model": {}, "args": Namespace(**said), "checkpoint_version": 3.0}
        torch.save(content, place / "model_optim_rng.pt")
    assert convert(tmp_path / "in", tmp_path / "run") == 2
    message = capsys.readouterr().err
    assert "expert_tensor_parallel_size was 1, and there are 2 tensor ranks" in message
    assert message.count("\n") == 1, "one line"
