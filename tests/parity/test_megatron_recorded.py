"""Checkpoints of versions of Megatron that the tests do not install, recorded in megatron_recorded.tar.xz.

    0.17.1/gpt_stacked …    `write_megatron_core.py` with SMALL=1, under megatron-core 0.17.1, 0.18.2 and 0.19.2
    bridge                  a `GPTModelProvider` of Megatron-Bridge 0.6.2: no args, run_config.yaml
    fsdp                    fsdp_dtensor: a mixture, its tensors cut into rows of two data ranks by the functions of
                            Megatron-FSDP in megatron-core 0.19.2 (uneven_dtensor.py), which itself needs a GPU

Each has the scores of megatron-core in an .npz.
"""

import io
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from mjax.commands import cli
from mjax.errors import UsageError
from mjax.interop.distributed_files import read_metadata
from mjax.interop.torch_files import TensorChunk, load_megatron_file
from tests.data.vocabularies import hf_byte_pairs
from tests.interop.whole_weights import assert_same, weights_of
from tests.parity.megatron_written import convert
from tests.parity.peers import scores_of

torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")

pytestmark = pytest.mark.parity

VERSIONS = ("0.17.1", "0.18.2", "0.19.2")
KINDS = {
    "gpt": ("stacked", "single", "torch"),
    "bert": ("stacked", "single", "torch"),
    "llama": (every := ("stacked", "single", "apart", "torch")),
    "narrow": ("stacked", "single", "torch"),
    "mixtral": every,
    "deepseek": every,
    "hybrid": ("single", "torch"),
    "hybrid_experts": ("single", "apart", "torch"),
    "hybrid_both": ("single", "torch"),
}
"""Layouts by kind; stacked and single are the same without a stack of layers, and apart without a gated MLP."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(Path(__file__).with_name("megatron_recorded.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


def assert_scores(run, theirs):
    """Compare the scores of a run with recorded ones; the last 3 of 32 rows are padding."""
    types = (theirs["types"], 1 - theirs["text"]) if "types" in theirs else ()
    config, found = scores_of(run, theirs["ids"], *types)
    scores, text = (found, ...) if not types else (found[0], theirs["text"] == 1)
    np.testing.assert_allclose(scores[..., :29][text], theirs["scores"][..., :29][text], atol=2e-5)
    if types:
        np.testing.assert_allclose(found[1], theirs["order"], atol=2e-5)
    return config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_version_has_its_scores(recorded, version, kind, tmp_path):
    """Scores of one layout, and the same weights in the others."""
    for layout in KINDS[kind]:
        assert convert(recorded / version / f"{kind}_{layout}", tmp_path / layout, "--vocabulary", "29") == 0
    first, *others = KINDS[kind]
    assert_scores(tmp_path / first, np.load(recorded / version / f"{kind}.npz"))
    for layout in others:
        assert_same(weights_of(tmp_path / layout), weights_of(tmp_path / first))


@pytest.mark.parametrize("kind", ["gpt", "llama", "mixtral", "hybrid", "hybrid_experts"])
def test_transformers_opens_export_with_the_same_scores(recorded, kind, tmp_path):
    """Megatron → Hugging Face, and back into a run with the same weights."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
    run, folder, again = tmp_path / "run", tmp_path / "hf", tmp_path / "again"
    assert convert(recorded / "0.19.2" / f"{kind}_single", run, "--vocabulary", "29") == 0
    assert cli.main(["convert", "to-hf", str(run), str(folder)]) == 0
    theirs = np.load(recorded / "0.19.2" / f"{kind}.npz")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        scores = model(torch.from_numpy(theirs["ids"])).logits.numpy()
    np.testing.assert_allclose(scores, theirs["scores"][..., :29], atol=2e-5)
    assert cli.main(["convert", "from-hf", str(folder), str(again)]) == 0
    assert_same(weights_of(again), weights_of(run))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "hybrid" not in kind])
@pytest.mark.parametrize("version", VERSIONS)
def test_export_equals_what_was_recorded(recorded, version, kind, tmp_path):
    """Import and export: tensors, names and arguments of megatron-core's own files, bit for bit."""
    assert convert(recorded / version / f"{kind}_torch", tmp_path / "run", "--vocabulary", "29") == 0
    for form in ("torch", "torch_dist"):
        flags = ("--format", form, "--transformer-impl", "local")
        assert cli.main(["convert", "to-megatron", str(tmp_path / "run"), str(tmp_path / form), *flags]) == 0
    folders = recorded / version / f"{kind}_torch" / "iter_0000005", tmp_path / "torch" / "release"
    theirs, ours = (load_megatron_file(folder / "mp_rank_00" / "model_optim_rng.pt") for folder in folders)
    tensors = {name: tensor for name, tensor in theirs["model"].items() if isinstance(tensor, torch.Tensor)}
    assert ours["model"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        rows = slice(29 if len(tensor) == 32 and ("word_embeddings" in name or "output_layer" in name) else None)
        assert torch.equal(ours["model"][name][rows], tensor[rows]), name
    theirs, ours = (vars(file["args"]) for file in (theirs, ours))
    others = {"padded_vocab_size", "make_vocab_size_divisible_by"}
    others |= set() if ours.get("moe_aux_loss_coeff") else {"moe_router_load_balancing_type"}
    same = {name: (ours[name] or None) == (theirs[name] or None) for name in theirs.keys() & ours.keys() - others}
    assert [name for name, equal in same.items() if not equal] == []
    layout = next(name for name in ("apart", "single") if name in KINDS[kind])
    folders = recorded / version / f"{kind}_{layout}" / "iter_0000005", tmp_path / "torch_dist" / "release"
    theirs, ours = ({*read_metadata(folder / ".metadata")} for folder in folders)
    own = {"optimizer.state.exp_avg.x", "common_state/shard_0_1"}  # of the writer
    whole = {name[:-2] if kind == "narrow" and name.endswith(("_w", "_v")) else name for name in ours}
    assert theirs - own == whole
    assert convert(tmp_path / "torch_dist", tmp_path / "again") == 0
    assert_same(weights_of(tmp_path / "again"), weights_of(tmp_path / "run"))


def test_bridge_checkpoint_is_read_without_args(recorded, tmp_path, capsys):
    assert convert(recorded / "bridge", tmp_path / "run", "--vocabulary", "29") == 0
    assert "assumed" not in capsys.readouterr().out
    model = assert_scores(tmp_path / "run", np.load(recorded / "bridge" / "scores.npz")).model
    assert (model.rope_theta, model.rope_factor, model.kv_heads, model.norm_epsilon) == (500_000, 32, 1, 1e-6)


def test_tokenizer_beside_weights_of_bridge_is_opened(recorded, tmp_path, capsys):
    copy = shutil.copytree(recorded / "bridge", tmp_path / "in")
    (copy / "iter_0000005" / "tokenizer").mkdir()
    hf_byte_pairs().save(str(copy / "iter_0000005" / "tokenizer" / "tokenizer.json"))
    assert convert(copy, tmp_path / "run") == 2
    assert "has 330 ids and the model's embedding" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_target_": "megatron.bridge.models.gemma.gemma_provider.GemmaModelProvider"}, "_target_ is 'megatron.br"),
        ({"transformer_layer_spec": {"_target_": "os.system", "_call_": True}}, "transformer_layer_spec is {'_call_'"),
        ({"activation_func": {"_target_": "torch._C._nn.gelu", "_call_": False}}, "activation_func is {'_call_': F"),
        ({"rope_scaling": False, "position_embedding_type": "yarn"}, "position_embedding_type is 'yarn'"),
        ({"num_layers": 3}, "num_layers is 3 among the arguments, and 2 by the tensors"),
        ({"of_later": 0.5}, "of_later is 0.5, but mjax supports only None"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_other_model_of_bridge_is_refused(recorded, change, words, tmp_path, capsys):
    copy = shutil.copytree(recorded / "bridge" / "iter_0000005", tmp_path / "in")
    config = yaml.safe_load((copy / "run_config.yaml").read_bytes())
    config["model"] |= change
    (copy / "run_config.yaml").write_text(yaml.safe_dump(config))
    assert convert(copy, tmp_path / "run", "--vocabulary", "29") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_fsdp_checkpoint_is_read_from_uneven_rows(recorded, tmp_path):
    assert convert(recorded / "fsdp", tmp_path / "run", "--vocabulary", "29") == 0
    model = assert_scores(tmp_path / "run", np.load(recorded / "fsdp" / "scores.npz")).model
    assert (model.experts, model.shared_expert_ffn_hidden) == (4, 10)


def test_fsdp_checkpoint_of_bridge_has_run_config(recorded, tmp_path, capsys):
    """Megatron-Bridge saves `checkpoint_version` next to the tensors, and no `args`."""
    copy = shutil.copytree(recorded / "fsdp" / "iter_0000005", tmp_path / "in")
    metadata = (copy / ".metadata").read_bytes()
    (copy / ".metadata").write_bytes(metadata.replace(b"\x8c\x04args", b"\x8c\x04none"))
    assert convert(copy, tmp_path / "run", "--vocabulary", "29") == 2
    assert "neither args nor embedding.position_embeddings.weight" in capsys.readouterr().err
    model = {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False}, "gated_linear_unit": True,
        "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False, "kv_channels": 4,
        "num_layers": 2, "num_attention_heads": 2, "num_query_groups": 1, "seq_length": 10, "num_moe_experts": 4,
        "moe_router_topk": 2, "moe_ffn_hidden_size": 6, "moe_shared_expert_intermediate_size": 10,
        "share_embeddings_and_output_weights": False,
    }  # fmt: skip
    (copy / "run_config.yaml").write_text(yaml.safe_dump({"model": model}))
    assert convert(copy, tmp_path / "run", "--vocabulary", "29") == 0
    assert_scores(tmp_path / "run", np.load(recorded / "fsdp" / "scores.npz"))


def test_checkpoint_without_common_state_is_refused(recorded, tmp_path, capsys):
    folder = recorded / "0.19.2" / "llama_stacked" / "iter_0000005"
    content = (folder / ".metadata").read_bytes().replace(b"common_state/shard_0_1", b"common_stale/shard_0_1")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / ".metadata").write_bytes(content)
    assert convert(tmp_path / "in", tmp_path / "run") == 2
    assert "holds neither common.pt nor common_state/shard_0_1; copy the whole" in capsys.readouterr().err


class Trap:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize(
    ("state", "cut", "words"),
    [
        ([Trap], 0, "wants to call posix.system, which is not part of"),
        ([{"args": None}], 40, "is truncated or not a file of torch.save"),
        ([{}, {}], 0, "is truncated or not a file of torch.save"),
        (["args"], 0, "holds a str, and a checkpoint is a dict"),
    ],
    ids=["executes", "cut off", "two states", "no dict"],
)
def test_harmful_common_state_is_refused_unexecuted(state, cut, words, tmp_path):
    content = io.BytesIO()
    torch.save([Trap(tmp_path / "sprung") if each is Trap else each for each in state], content)
    (tmp_path / "__0_0.distcp").write_bytes(b"before" + content.getvalue())
    chunk = TensorChunk((), (), "__0_0.distcp", 6, len(content.getvalue()) - cut)
    with pytest.raises(UsageError) as refused:
        load_megatron_file(tmp_path / chunk.file, chunk)
    assert words in str(refused.value)
    assert not (tmp_path / "sprung").exists()
