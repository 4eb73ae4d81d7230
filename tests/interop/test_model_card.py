"""README.md of a model through `mjax convert`."""

import json

from mjax import cli
from mjax.interop.model_card import BEGIN, END, with_block
from tests.interop.folders import LLAMA, tensors_of, write_folder

THEIRS = "---\nlicense: apache-2.0\n---\n# Tiny\n\nA card --- of someone else.\n"


def converted(folder, *runs):
    for command, source, output in runs:
        assert cli.main(["convert", command, str(folder / source), str(folder / output)]) == 0


def test_an_export_says_what_it_is_and_keeps_the_card_of_its_source(tmp_path):
    source = write_folder(tmp_path / "tiny", LLAMA, tensors_of(LLAMA))
    (source / "README.md").write_text(THEIRS)
    converted(tmp_path, ("from-hf", "tiny", "run"), ("to-hf", "run", "out"))
    card = (tmp_path / "out" / "README.md").read_text()
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
    (tmp_path / "out" / "README.md").write_text(card + "\nMine.\n")
    converted(tmp_path, ("from-hf", "out", "again"), ("to-hf", "again", "out again"))
    second = (tmp_path / "out again" / "README.md").read_text()
    assert second.count(BEGIN) == second.count(END) == 1
    assert second.count("\n- ") == 4
    assert second.endswith("A card --- of someone else.\n\nMine.\n")


def test_a_replaced_export_keeps_what_was_written_in_its_card(tmp_path):
    write_folder(tmp_path / "tiny", LLAMA, tensors_of(LLAMA))
    converted(tmp_path, ("from-hf", "tiny", "run"), ("to-hf", "run", "out"))
    card = tmp_path / "out" / "README.md"
    assert card.read_text().startswith("---\nlibrary_name: transformers\n---\n")
    card.write_text(card.read_text() + "\nMine.\n")
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--overwrite"]) == 0
    assert card.read_text().endswith("\nMine.\n")


def test_an_export_that_replaces_that_of_another_run_does_not_keep_its_card_and_license(tmp_path):
    write_folder(tmp_path / "tiny", LLAMA, tensors_of(LLAMA))
    converted(tmp_path, ("from-hf", "tiny", "run"), ("from-hf", "tiny", "other"), ("to-hf", "other", "out"))
    card = tmp_path / "out" / "README.md"
    card.write_text(card.read_text().replace("---\nlibrary", "---\nlicense: other\nlibrary") + "\nTheirs.\n")
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--overwrite"]) == 0
    assert "license" not in card.read_text()
    assert "Theirs" not in card.read_text()


def test_the_card_of_a_trained_run_has_its_steps_and_tokens(tmp_path):
    write_folder(tmp_path / "tiny", LLAMA, tensors_of(LLAMA))
    converted(tmp_path, ("from-hf", "tiny", "run"))
    run = tmp_path / "run"
    (run / "checkpoints" / "0").rename(run / "checkpoints" / "20")
    manifest = run / "checkpoints" / "20" / "manifest.json"
    manifest.write_text(renumbered(manifest.read_text()))
    records = [{"step": step, "tokens": 64_000 * step, "loss": 2.0} for step in (10, 20, 30)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    converted(tmp_path, ("to-hf", "run", "out"))
    line = "- checkpoint 20 of the run `run`: trained for 20 steps and 1,280,000 tokens\n"
    assert line in (tmp_path / "out" / "README.md").read_text()


def renumbered(manifest):
    """The manifest of checkpoint 0 as that of checkpoint 20."""
    from mjax.state.manifest import _checksum_json

    content = {name: value for name, value in json.loads(manifest).items() if name != "checksum"} | {"step": 20}
    return json.dumps({"checksum": _checksum_json(content), **content})


def test_a_card_without_front_matter_is_kept_whole():
    assert with_block("# Tiny\n---\nrule\n---\n", "ours") == (
        f"---\nlibrary_name: transformers\n---\n\n{BEGIN}\nours\n{END}\n\n# Tiny\n---\nrule\n---\n"
    )
