"""Checkpoints of megatron-core in mjax and back: megatron-core loads the export, and its scores are the same."""

import numpy as np
import pytest

from mjax.commands import cli
from tests.interop.whole_weights import assert_same, weights_of
from tests.parity.megatron_written import convert, write_with_megatron_core

pytest.importorskip("torch", reason="torch is not installed: make test-ci")
pytest.importorskip("megatron.core", reason="megatron-core is not installed: make test-ci")

pytestmark = pytest.mark.parity

VOCABULARY = 29
SOURCES = {
    "gpt": "gpt_single", "bert": "bert_torch", "llama": "llama_apart", "narrow": "narrow_single",
    "mixtral": "mixtral_torch", "before": "before_torch", "deepseek": "deepseek_torch",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder with a run of each kind, and its scores in megatron-core."""
    folder = tmp_path_factory.mktemp("written")
    write_with_megatron_core(folder, *SOURCES)
    for kind, source in SOURCES.items():
        assert convert(folder / source, folder / kind, "--vocabulary", str(VOCABULARY)) == 0
    return folder


def export(run, output, *flags):
    return cli.main(["convert", "to-megatron", str(run), str(output), *flags])


@pytest.mark.parametrize(
    ("kinds", "flags", "ranks"),
    [
        (SOURCES, (), {}),
        (SOURCES, ("--format", "torch"), {}),
        (("gpt", "llama", "mixtral"), (), {"ranks": 2}),
        (("bert", "narrow"), ("--format", "torch", "--tensor", "2", "--pipeline", "3"), {"ranks": 6, "stages": 3}),
        (("before",), ("--format", "torch", "--expert", "2"), {"ranks": 2, "expert_ranks": 2}),
    ],
    ids=["torch_dist", "torch", "torch_dist on two ranks", "tensor and pipeline ranks", "expert ranks"],
)
def test_megatron_core_loads_export(runs, kinds, flags, ranks, tmp_path):
    for kind in kinds:
        assert export(runs / kind, tmp_path / kind, *flags) == 0
        back = tmp_path / f"{kind} again"
        assert convert(tmp_path / kind, back, "--vocabulary", str(VOCABULARY)) == 0
        assert_same(weights_of(back), weights_of(runs / kind))
    write_with_megatron_core(tmp_path, *(f"{kind}={tmp_path / kind}" for kind in kinds), **ranks)
    for kind in kinds:
        expected = np.load(runs / f"{kind}.npz")["scores"][..., :VOCABULARY]
        found = np.load(tmp_path / kind / "scores.npy")[..., :VOCABULARY]
        np.testing.assert_allclose(found, expected, atol=2e-6, err_msg=kind)
