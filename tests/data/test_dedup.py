import gzip
import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from mjax import cli
from mjax.commands import dedup as dedup_module
from mjax.commands.dedup import DedupArguments, dedup
from mjax.errors import RunError, UsageError
from tests.conftest import ROOT
from tests.products import one_in

STORY = "It was a bright cold day in April and the clocks were striking thirteen as Winston Smith slipped through"


def lines(file, texts, **fields):
    file.write_text("".join(json.dumps({"id": i, "text": text} | fields) + "\n" for i, text in enumerate(texts)))
    return file


def read(file):
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def run(*inputs, output, **options):
    return dedup(DedupArguments(output=output, inputs=inputs, **{"workers": 1, **options}))


def kept(tmp_path, texts, **options):
    """The numbers of the documents that stay."""
    run(lines(tmp_path / "in.jsonl", texts), output=tmp_path / "out.jsonl", **options)
    return [document["id"] for document in read(tmp_path / "out.jsonl")]


def overlapping(common, union):
    """Two texts of different words, `common` of `union` of which are in both."""
    words = [f"w{number}" for number in range(union)]
    return [" ".join(words[:common]), " ".join(words)]


def outputs(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.startswith("out")}


# --- What goes and what stays -----------------------------------------------------------------------------------------


def test_of_equal_texts_the_first_stays_with_all_its_fields(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"n": 1.5, "text": "é"}\n{"text": "b", "x": [null]}\n{"text": "\\u00e9", "n": 2}\n{"text": "b"}\n')
    run(file, output=tmp_path / "out.jsonl", exact=True)
    assert (tmp_path / "out.jsonl").read_text() == '{"n": 1.5, "text": "é"}\n{"text": "b", "x": [null]}\n'
    assert [(each["source"], each["kept"]) for each in read(tmp_path / "out.removed.jsonl")] == [
        (f"{file}:3", f"{file}:1"),
        (f"{file}:4", f"{file}:2"),
    ]


def test_only_equal_texts_go_where_only_they_are_asked_for(tmp_path):
    assert kept(tmp_path, ["a b c d e f", "A b c d e f", "a b c d e f "], exact=True) == [0, 1, 2]


@pytest.mark.parametrize("scale", [1, 3, 10, 100])
def test_a_pair_exactly_at_the_threshold_goes_and_one_below_stays(tmp_path, scale):
    assert kept(tmp_path, overlapping(7 * scale, 10 * scale), shingle_size=1) == [0]
    assert kept(tmp_path, overlapping(7 * scale - 1, 10 * scale), shingle_size=1, overwrite=True) == [0, 1]


def test_a_duplicate_of_a_duplicate_goes_and_the_list_says_why(tmp_path):
    words = [f"w{number}" for number in range(140)]
    texts = [" ".join(words[20 * i : 20 * i + 100]) for i in range(3)]  # neighbours: 80 of 120; ends: 60 of 140
    assert kept(tmp_path, [*texts, texts[2]], shingle_size=1, threshold=0.6) == [0]
    second, third, same = read(tmp_path / "out.removed.jsonl")
    name = tmp_path / "in.jsonl"
    story = {"reason": "near-duplicate", "kept": f"{name}:1", "similar_to": f"{name}:1", "jaccard": 0.6667}
    assert second == {"source": f"{name}:2", **story}
    assert third == {"source": f"{name}:3", **story, "similar_to": f"{name}:2"}
    assert same == {
        "source": f"{name}:4",
        "reason": "exact duplicate",
        "kept": f"{name}:1",
        "similar_to": f"{name}:3",
        "jaccard": 1.0,
    }


def test_words_are_compared_without_case_and_punctuation(tmp_path):
    text = STORY
    assert kept(tmp_path, [text, text.upper() + "!!!", text.replace(" ", ", ")]) == [0]


def test_short_texts_are_duplicates_if_all_their_words_are_the_same_and_empty_ones_if_they_are_equal(tmp_path):
    texts = ["yes", "Yes!", "no", "yes yes", "", "", "…", "...", " "]
    assert kept(tmp_path, texts) == [0, 2, 3, 4, 6, 7, 8]


def test_languages_without_spaces_are_compared_by_characters(tmp_path):
    text = (
        "一九八四年四月四日的白天晴朗而寒冷钟敲了十三下温斯顿史密斯为了躲避寒风紧缩着脖子很快地溜进了胜利大厦的玻璃门"
    )
    texts = [text, text.replace("寒冷", "温暖"), text[::-1]]
    assert kept(tmp_path, texts) == [0, 1, 2]
    assert kept(tmp_path, texts, shingles="characters", overwrite=True) == [0, 2]


def test_all_formats_are_read_and_one_is_written(tmp_path):
    text = STORY
    (tmp_path / "a.txt").write_text(text)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as stream:
        stream.write(json.dumps({"text": text + " more", "n": 1}) + "\n" + json.dumps({"text": "other", "n": 2}) + "\n")
    run(tmp_path / "a.txt", tmp_path / "b.jsonl.gz", output=tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl") == [{"text": text}, {"text": "other", "n": 2}]


def test_what_json_cannot_say_in_utf_8_is_escaped(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a", "title": "\\ud83d"}\n')
    run(tmp_path / "in.jsonl", output=tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == '{"text": "a", "title": "\\ud83d"}\n'


def test_no_documents_are_no_trouble(tmp_path):
    assert kept(tmp_path, []) == []


# --- The report -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path):
    """Families of similar texts, equal ones, short ones, in two files."""
    random = np.random.default_rng(0)
    texts = []
    for family in range(30):
        for _ in range(6):
            words = [f"f{family}w{number}" for number in range(100)]
            words[random.integers(100)] = f"x{random.integers(4)}"
            texts.append(" ".join(words))
    texts += ["", "", "few words", "few words"]
    texts = [texts[number] for number in random.permutation(len(texts))]
    return lines(tmp_path / "a.jsonl", texts[:100]), lines(tmp_path / "b.jsonl", texts[100:])


def test_the_report_adds_up(mixed, tmp_path):
    report = run(*mixed, output=tmp_path / "out.jsonl")
    assert report == json.loads((tmp_path / "out.report.json").read_text())
    documents = [one for file in mixed for one in read(file)]
    exact, near = report["removed"]
    assert report["read"]["documents"] == len(documents) == 184
    assert report["kept"]["documents"] == len(read(tmp_path / "out.jsonl")) == 32
    assert exact["documents"] + near["documents"] == len(read(tmp_path / "out.removed.jsonl")) == 184 - 32
    assert exact["documents"] == len(documents) - len({document["text"] for document in documents})
    for size in ("documents", "bytes"):
        assert report["read"][size] == exact[size] + near[size] + report["kept"][size]
    found = report["near_duplicates"]
    assert (found["clusters"], found["bands"], found["rows"]) == (30, 42, 6)
    assert found["expected_recall"]["0.7"] == 0.99479
    assert sum(found["removed_by_jaccard"].values()) == near["documents"]


def test_examples_begin_with_the_least_similar_and_show_where_texts_differ(mixed, tmp_path):
    report = run(*mixed, output=tmp_path / "out.jsonl")
    near = [one for one in read(tmp_path / "out.removed.jsonl") if one["reason"] == "near-duplicate"]
    examples = report["removed"][1]["examples"]
    assert len(examples) == 10
    assert [one["jaccard"] for one in examples] == sorted(one["jaccard"] for one in near)[:10]
    for one in examples:
        assert one["text"] != one["similar_text"]
        assert max(len(one["text"]), len(one["similar_text"])) <= 202


def test_the_table_says_what_happened(mixed, tmp_path, capsys):
    run(*mixed, output=tmp_path / "out.jsonl")
    shown = capsys.readouterr().out
    for what in ("184 documents", "− near-duplicate", "30 clusters", "99.5%", "out.removed.jsonl", "out.report.json"):
        assert what in shown


def test_json_prints_the_report_and_nothing_else(mixed, tmp_path, capsys):
    run(*mixed, output=tmp_path / "out.jsonl", json=True)
    assert capsys.readouterr().out == (tmp_path / "out.report.json").read_text()


def test_the_command_line_runs_it(mixed, tmp_path, capsys):
    command = ["dedup", *map(str, mixed), "--output", str(tmp_path / "out.jsonl"), "--exact", "--workers", "1"]
    assert cli.main(command) == 0
    assert "− exact duplicate" in capsys.readouterr().out


# --- The same bytes, or none ------------------------------------------------------------------------------------------


def test_the_result_does_not_depend_on_workers_or_blocks(mixed, tmp_path, monkeypatch):
    run(*mixed, output=tmp_path / "out.jsonl")
    alone = outputs(tmp_path)
    monkeypatch.setattr("mjax.data.blocks.SIZE", 3000)
    monkeypatch.setattr("mjax.data.near_duplicates.COMPARISONS", 1)
    monkeypatch.setattr("mjax.data.near_duplicates.AT_ONCE", 2)
    run(*mixed, output=tmp_path / "out.jsonl", workers=3, overwrite=True)
    assert outputs(tmp_path) == alone


def test_a_run_that_is_stopped_leaves_nothing_and_what_a_killed_one_left_does_not_matter(mixed, tmp_path, monkeypatch):
    (tmp_path / "out.jsonl.tmp").mkdir()
    (tmp_path / "out.jsonl.tmp" / "kept").write_text("half a line")

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dedup_module, "where_they_differ", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(*mixed, output=tmp_path / "out.jsonl")
    assert outputs(tmp_path) == {}
    run(*mixed, output=tmp_path / "out.jsonl")
    assert sorted(outputs(tmp_path)) == ["out.jsonl", "out.removed.jsonl", "out.report.json"]


def test_a_full_disk_stops_the_run_and_leaves_nothing(mixed, tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("mjax.data.near_duplicates.ShingleFile.write", full)
    with pytest.raises(RunError, match="No space left on device; nothing was left under that name"):
        run(*mixed, output=tmp_path / "out.jsonl")
    assert outputs(tmp_path) == {}


def test_an_input_that_changes_while_it_is_read_is_noticed(mixed, tmp_path, monkeypatch):
    def changing(*arguments):
        lines(mixed[0], ["only one"])
        return candidates(*arguments)

    candidates = dedup_module.candidates
    monkeypatch.setattr("mjax.commands.dedup.candidates", changing)
    with pytest.raises(RunError, match=r"a\.jsonl changed while it was read; run the same command again"):
        run(*mixed, output=tmp_path / "out.jsonl")


@pytest.mark.parametrize(("command", "flags"), one_in(3, product(["dedup", "clean"], [[], ["--overwrite"]])), ids=str)
def test_a_run_killed_before_any_file_operation_leaves_a_whole_output_or_none_and_can_be_repeated(
    tmp_path, command, flags
):
    line = [sys.executable, "-m", "tests.data.kill_cleaning", command, str(tmp_path / "place"), *flags]
    result = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(result.stdout.splitlines()[-1]) >= 12


# --- What is refused --------------------------------------------------------------------------------------------------


def test_a_malformed_line_stops_the_run_or_is_skipped_and_counted(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\noops\n{"text": "a"}\n{"body": "b"}\n')
    with pytest.raises(UsageError, match=r"in\.jsonl:2: .*--malformed skip"):
        run(tmp_path / "in.jsonl", output=tmp_path / "out.jsonl")
    assert outputs(tmp_path) == {}
    report = run(tmp_path / "in.jsonl", output=tmp_path / "out.jsonl", malformed="skip")
    assert report["malformed"]["documents"] == 2
    assert "in.jsonl:2: " in report["malformed"]["examples"][0]
    assert "2 malformed lines were skipped" in capsys.readouterr().out
    (removed,) = read(tmp_path / "out.removed.jsonl")
    assert (removed["source"], removed["kept"]) == (f"{tmp_path / 'in.jsonl'}:3", f"{tmp_path / 'in.jsonl'}:1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": ()}, "no input; give .txt, .jsonl or .parquet files"),
        ({"inputs": (Path("none.jsonl"),)}, "there is no file none.jsonl"),
        ({"output": Path("out.txt")}, r"--output out\.txt is not a \.jsonl file; give one such as out\.jsonl"),
        ({"output": Path("in.jsonl"), "overwrite": True}, r"would overwrite the input in\.jsonl; choose another"),
        ({"output": Path("there.jsonl")}, r"there\.jsonl exists; choose another --output, or add --overwrite"),
        ({"threshold": 0.1}, r"--threshold 0\.1 .*use 0\.3 to 1"),
        ({"shingle_size": 0}, "--shingle-size is 0"),
        ({"workers": 0}, "--workers is 0; it must be at least 1"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_read(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    lines(Path("in.jsonl"), ["a"])
    Path("there.jsonl").write_text("precious")
    with pytest.raises(UsageError, match=message):
        dedup(DedupArguments(**{"inputs": (Path("in.jsonl"),), "output": Path("out.jsonl"), **options}))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "there.jsonl"]


def test_an_output_that_cannot_be_written_stops_the_run(mixed, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        run(*mixed, output=tmp_path / "file" / "out.jsonl")


def test_text_is_deduplicated_and_cleaned_without_jax():
    code = "import sys, mjax.commands.dedup, mjax.commands.clean; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
