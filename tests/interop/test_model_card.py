"""README.md of a model through `mjax convert`."""

import json

import pytest

from mjax import cli
from mjax.interop.model_card import BEGIN, END, with_block
from mjax.state.manifest import _checksum_json
from tests.interop.folders import LLAMA, tensors_of, write_folder

THEIRS = "---\nlicense: apache-2.0\n---\n# Tiny\n\nA card --- of someone else.\n"


@pytest.fixture
def convert(tmp_path):
    """A function that converts by the names of folders, of which `tiny` has a model; returns the card."""
    write_folder(tmp_path / "tiny", LLAMA, tensors_of(LLAMA))

    def convert(command, source, output, *flags):
        assert cli.main(["convert", command, str(tmp_path / source), str(tmp_path / output), *flags]) == 0
        return tmp_path / output / "README.md"

    return convert


def test_card_of_source_is_kept(convert, tmp_path):
    (tmp_path / "tiny" / "README.md").write_text(THEIRS)
    convert("from-hf", "tiny", "run")
    file = convert("to-hf", "run", "out")
    card = file.read_text()
    assert card.startswith("---\nlicense: apache-2.0\n---\n")
    assert card.endswith("# Tiny\n\nA card --- of someone else.\n")
    for said in (
        "`LlamaForCausalLM` with 12,144 parameters in float32: 2 layers, hidden size 16, 4 attention heads (2 of",
        "vocabulary 257, sequences of up to 16 tokens.",
        "- converted by mjax from `tiny`, a LlamaForCausalLM\n- checkpoint 0 of the run `run`: the weights",
        'model = AutoModelForCausalLM.from_pretrained("out")',
    ):
        assert said in card, card
    assert "AutoTokenizer" not in card  # there is none
    # The next conversion replaces the block and adds to the history; what a person wrote beside it stays.
    file.write_text(card + "\nMine.\n")
    convert("from-hf", "out", "again")
    second = convert("to-hf", "again", "second").read_text()
    assert second.count(BEGIN) == second.count(END) == 1
    assert second.count("\n- ") == 4
    assert second.endswith("A card --- of someone else.\n\nMine.\n")


def test_replaced_export_keeps_card_of_same_run(convert):
    convert("from-hf", "tiny", "run")
    convert("from-hf", "tiny", "other")
    card = convert("to-hf", "run", "out")
    assert card.read_text().startswith("---\nlibrary_name: transformers\n---\n")
    card.write_text(card.read_text().replace("---\nlibrary", "---\nlicense: mine\nlibrary") + "\nMine.\n")
    for run, kept in (("run", True), ("other", False)):
        convert("to-hf", run, "out", "--overwrite")
        assert card.read_text().endswith("\nMine.\n") == kept
        assert ("license" in card.read_text()) == kept


def test_card_of_trained_run_counts_steps(convert, tmp_path):
    convert("from-hf", "tiny", "run")
    step = (tmp_path / "run" / "checkpoints" / "0").rename(tmp_path / "run" / "checkpoints" / "20")
    content = json.loads((step / "manifest.json").read_text()) | {"step": 20}
    del content["checksum"]
    (step / "manifest.json").write_text(json.dumps({"checksum": _checksum_json(content), **content}))
    records = [{"step": step, "tokens": 64_000 * step, "loss": 2.0} for step in (10, 20, 30)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    line = "- checkpoint 20 of the run `run`: trained for 20 steps and 1,280,000 tokens\n"
    assert line in convert("to-hf", "run", "out").read_text()


def test_card_without_front_matter_is_kept():
    assert with_block("# Tiny\n---\nrule\n---\n", "ours") == (
        f"---\nlibrary_name: transformers\n---\n\n{BEGIN}\nours\n{END}\n\n# Tiny\n---\nrule\n---\n"
    )
