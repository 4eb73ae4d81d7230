"""README.md of a model through `mjax convert`."""

import pytest

from mjax.commands import cli
from mjax.interop.model_folder import BEGIN, END
from tests.interop.folders import LLAMA, tensors_of, write_folder

THEIRS = "---\nlicense: apache-2.0\n---\n# Tiny\n\nA card --- of someone else.\n"


@pytest.fixture
def convert(tmp_path):
    """A function that converts by the names of folders (`tiny` has the models) and returns the card."""
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
        "`LlamaForCausalLM` with 12,144 parameters in float32: 2 layers, hidden size 16, vocabulary 257, ",
        "sequences of up to 16 tokens.",
        "- converted by mjax from `tiny`, a LlamaForCausalLM\n- checkpoint 0 of the run `run`: the weights",
        'model = AutoModelForCausalLM.from_pretrained("out")',
    ):
        assert said in card, card
    assert "AutoTokenizer" not in card  # there is none
    # The next conversion replaces the block and adds to the history; text around it stays.
    file.write_text(card + "\nMine.\n")
    convert("from-hf", "out", "again")
    second = convert("to-hf", "again", "second").read_text()
    assert second.count(BEGIN) == second.count(END) == 1
    assert second.count("\n- ") == 4
    assert second.endswith("A card --- of someone else.\n\nMine.\n")
