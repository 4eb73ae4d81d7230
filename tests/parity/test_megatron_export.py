"""Checkpoints of megatron-core in mjax and back: megatron-core loads the export, and its scores are the same."""

import shlex
from dataclasses import replace

import numpy as np
import pytest

from mjax.commands import cli
from mjax.commands import convert as convert_command
from mjax.config import Config, GPTConfig, read_settings, save_config
from mjax.config.model import convert_kind
from mjax.data.tokenizers import load_tokenizer
from mjax.interop.convert import write_run
from tests.data.vocabularies import bert_file
from tests.interop.megatron_files import draw
from tests.interop.whole_weights import assert_same, weights_of
from tests.parity.megatron_written import convert, write_with_megatron_core

pytest.importorskip("torch", reason="torch is not installed: make test-ci")
pytest.importorskip("megatron.core", reason="megatron-core is not installed: make test-ci")

from tests.parity.write_megatron_core import PADDED, VOCABULARY

pytestmark = pytest.mark.parity

SOURCES = {
    "gpt": "gpt_single", "bert": "bert_torch", "llama": "llama_apart", "narrow": "narrow_single",
    "mixtral": "mixtral_torch", "before": "before_torch", "deepseek": "deepseek_torch", "dense": "dense_single",
}  # fmt: skip
LATENT = {"latent": "latent_torch", "latent_softmax": "latent_softmax_single"}
"""Kinds of TransformerEngine only."""
LOCAL, STAGES = ("--transformer-impl", "local"), ("--tensor", "2", "--pipeline", "3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder with a run of each kind, and its scores in megatron-core."""
    folder = tmp_path_factory.mktemp("written")
    write_with_megatron_core(folder, *SOURCES, *LATENT)
    for kind, source in (SOURCES | LATENT).items():
        assert convert(folder / source, folder / kind, "--vocabulary", str(VOCABULARY)) == 0
    return folder


def export(run, output, *flags):
    return cli.main(["convert", "to-megatron", str(run), str(output), *flags])


@pytest.mark.parametrize(
    ("kinds", "flags", "ranks"),
    [
        (SOURCES | LATENT, (), {}),
        (SOURCES, ("--format", "torch", *LOCAL), {}),
        (("llama", "dense"), LOCAL, {}),
        (("gpt", "llama", "mixtral", "latent"), (), {"ranks": 2}),
        (("bert", "narrow"), ("--format", "torch", *LOCAL, *STAGES), {"ranks": 6, "stages": 3}),
        (("before",), ("--format", "torch", "--expert", "2", *LOCAL), {"ranks": 2, "expert_ranks": 2}),
    ],
    ids=["torch_dist", "torch", "local", "torch_dist on two ranks", "tensor and pipeline ranks", "expert ranks"],
)
def test_megatron_core_loads_export(runs, kinds, flags, ranks, tmp_path):
    places = {kind: tmp_path / f"{kind} {'local' if LOCAL[0] in flags else 'engine'}" for kind in kinds}
    for kind, place in places.items():
        assert export(runs / kind, place, *flags) == 0
        back = tmp_path / f"{kind} again"
        assert convert(place, back) == 0
        assert_same(weights_of(back), weights_of(runs / kind))
    write_with_megatron_core(tmp_path, *(f"{kind}={place}" for kind, place in places.items()), **ranks)
    for kind in kinds:
        expected = np.load(runs / f"{kind}.npz")["scores"][..., :VOCABULARY]
        found = np.load(places[kind] / "scores.npy")[..., :VOCABULARY]
        np.testing.assert_allclose(found, expected, atol=2e-6, err_msg=kind)


@pytest.mark.parametrize("kind", [kind for kind in SOURCES if kind != "before"])  # whose experts are in one matrix
def test_export_equals_what_megatron_core_wrote(runs, kind, tmp_path):
    import torch

    assert export(runs / kind, tmp_path / "out", "--format", "torch", *LOCAL) == 0
    files = (runs / f"{kind}_torch" / "iter_0000005", tmp_path / "out" / "release")
    written, exported = (torch.load(it / "mp_rank_00" / "model_optim_rng.pt", weights_only=False) for it in files)
    assert exported["checkpoint_version"] == written["checkpoint_version"]
    tensors = {name: tensor for name, tensor in written["model"].items() if isinstance(tensor, torch.Tensor)}
    assert exported["model"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        rows = slice(VOCABULARY if len(tensor) == PADDED else None)  # the others pad the vocabulary
        assert torch.equal(exported["model"][name][rows], tensor[rows]), name
    theirs, ours = vars(written["args"]), vars(exported["args"])
    others = {"padded_vocab_size", "make_vocab_size_divisible_by"}
    others |= set() if ours.get("moe_aux_loss_coeff") else {"moe_router_load_balancing_type"}
    differences = {name: (ours[name], theirs[name]) for name in theirs.keys() & ours.keys() - others}
    assert {name: pair for name, pair in differences.items() if (pair[0] or None) != (pair[1] or None)} == {}


@pytest.mark.parametrize("kind", ["gpt", "bert", "llama", "dense"])
def test_names_with_transformer_engine(runs, kind, tmp_path):
    """megatron-core maps the names of its local layers to these in the format torch_dist."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    names = {}
    for implementation in ("local", "transformer_engine"):
        out = tmp_path / implementation
        assert export(runs / kind, out, "--format", "torch", "--transformer-impl", implementation) == 0
        names[implementation] = torch.load(out / "release/mp_rank_00/model_optim_rng.pt", weights_only=False)["model"]
    expected = set()
    for name in names["local"]:
        experts = name.replace("pre_mlp_layernorm", "mlp.router")
        for plain, fused in get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map.items():
            name = name.replace(plain, fused) if experts == name or experts not in names["local"] else name
        expected.add(name)
    assert names["transformer_engine"].keys() == expected


MODEL = GPTConfig(layers=2, hidden=24, heads=4, sequence=10, vocabulary=257, vocabulary_multiple=8)


@pytest.fixture
def run(tmp_path):
    """A run with a tokenizer."""
    weights = draw(MODEL)
    reader = lambda name, first, end: weights[name][first:end]  # noqa: E731
    write_run(tmp_path / "run", Config(model=MODEL), load_tokenizer("bytes"), reader)
    return tmp_path / "run"


def test_tokenizer_and_command_come_with_export(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert export(run, out, "--dtype", "bf16", "--format", "torch", "--tensor", "2") == 0
    printed = capsys.readouterr().out
    assert "embedding: 257 tokens, padded to 512 rows" in printed
    words = shlex.split(printed.rpartition("load it")[2])
    assert words[:6] == ["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", "--load", str(out)]
    assert words[-5:] == ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{out}/tokenizer", "--bf16"]
    assert (out / "tokenizer" / "tokenizer.json").is_file()
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert sorted(file.name for file in (out / "release").iterdir()) == ["mp_rank_00", "mp_rank_01"]
    assert convert(out, tmp_path / "again", "--vocabulary-multiple", "8") == 0
    assert read_settings(tmp_path / "again" / "config.json").model.vocabulary == 257
    assert (tmp_path / "again" / "tokenizer").is_dir()
    for name, array in weights_of(tmp_path / "again").items():
        np.testing.assert_allclose(array, weights_of(run)[name], rtol=2**-8)
    assert {path.name for path in (run / "tokenizer").iterdir()} <= {
        path.name for path in (tmp_path / "again" / "tokenizer").iterdir()
    }


def test_bert_comes_with_its_vocabulary_file(tmp_path, capsys):
    model = replace(convert_kind(MODEL, "bert"), vocabulary=300, mlm_activation="gelu_erf")
    weights, tokenizer = draw(model), load_tokenizer(f"bert-cased:{bert_file(tmp_path / 'vocab', False)}")
    write_run(tmp_path / "run", Config(model=model), tokenizer, lambda name, first, end: weights[name][first:end])
    assert export(tmp_path / "run", tmp_path / "out") == 0
    words = shlex.split(capsys.readouterr().out.rpartition("load it")[2])
    assert (words[3], words[-3]) == ("pretrain_bert.py", "BertWordPieceCase")
    assert words[-2:] == ["--vocab-file", str(tmp_path / "out" / "tokenizer" / "vocab.txt")]
    assert (tmp_path / "out" / "tokenizer" / "vocab.txt").is_file()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tensor", "2"), "--tensor 2 is for --format torch; remove it: torch_dist loads into any split"),
        (("--format", "torch", "--tensor", "3"), "--tensor 3 does not divide heads 4; use 1, 2, 4"),
        (("--format", "torch", "--expert", "2"), "--expert 2"),
        (("--step", "7"), "7"),
    ],
    ids=str,
)
def test_impossible_export_leaves_nothing(run, flags, words, tmp_path, capsys):
    assert export(run, tmp_path / "out", *flags) == 2
    assert words in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [run]


def test_failed_export_leaves_nothing(run, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(convert_command, "write_release", fail)
    assert export(run, tmp_path / "out") != 0
    assert [*tmp_path.iterdir()] == [run]


def test_adapters_are_refused(run, tmp_path, capsys):
    adapters = tmp_path / "adapters"
    model = replace(MODEL, lora_rank=2)
    adapters.mkdir()
    save_config(Config(model=model), adapters / "config.json")
    assert export(adapters, tmp_path / "out") == 2
    assert "holds adapters; add --merged" in capsys.readouterr().err
    assert export(run, tmp_path / "out", "--merged") == 2
    assert "has no adapters; remove --merged" in capsys.readouterr().err
