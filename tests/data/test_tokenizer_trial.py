"""A tokenizer of a stranger neither hangs, fills nor crashes this process, and a good one is tried once."""

import base64
import json

import pytest
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from mjax.data import tokenizer_trial
from mjax.data.tokenizer_trial import MAX_TEMPLATE_CHARACTERS, SAMPLE_TEXT, encode_texts, mark_trusted
from mjax.data.tokenizers import SentencePieceTokenizer, load_tokenizer, tokenizer_from_folder, train_sentencepiece
from mjax.errors import UsageError
from mjax.generation.chat import Chat
from mjax.interop.tokenizer_files import open_tokenizer
from tests.data.vocabularies import TEXTS, foreign_model, hf_byte_pairs

CHAINED = [("a", "aa")] * 40
"""Of one letter they make 2^40."""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing has been tried."""
    monkeypatch.setattr(tokenizer_trial, "_problems", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mjax" / "tokenizers"


@pytest.fixture
def trials(monkeypatch):
    """The questions that children were asked."""
    asked, ask = [], tokenizer_trial.Child.ask
    monkeypatch.setattr(tokenizer_trial.Child, "ask", lambda child, *given: asked.append(given) or ask(child, *given))
    return asked


def written(library, folder, **changes):
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(library.to_str()) | changes))
    return file


def with_rules(*rules, text_of=normalizers):
    steps = [text_of.Replace(pattern, content) for pattern, content in rules]
    library = hf_byte_pairs()
    setattr(library, "normalizer" if text_of is normalizers else "decoder", text_of.Sequence(steps))
    return library


def with_prefix():
    library = hf_byte_pairs()
    library.normalizer = normalizers.Prepend("x" * 100_000)
    return library


def with_backtracking():
    library = hf_byte_pairs()
    library.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$|(.*)*z"), "isolated")
    return library


COPIES = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 90,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}
HUGE = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff\xff\xff\xf0abc").decode()}
"""A table of which the library reserves 4 GB before it reads."""
DIES = "is not done after 1 s; get the file again from its publisher, or use another tokenizer"


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [
        (lambda: with_rules(*CHAINED), {}, DIES),
        (lambda: with_rules(*CHAINED, text_of=decoders), {}, DIES),
        (hf_byte_pairs, {"normalizer": HUGE}, "it takes more than 256 MiB"),
        (with_prefix, {}, "it writes .* tokens for a text of length"),
        (lambda: with_rules(*[(Regex("[a]"), "aa")] * 11), {}, r"it writes 2,048 tokens for a text of length 1 \('a'…"),
        (hf_byte_pairs, {"post_processor": COPIES}, "more than 64 for each character"),
        (with_backtracking, {}, "it crashes .*PanicException"),
    ],
    ids=["forty rules", "forty decoders", "memory", "prefix", "expansion", "copies", "panic"],
)
def test_strange_tokenizer_is_refused(tmp_path, monkeypatch, make, changes, words):
    if words == DIES:  # the others end by themselves, on a busy machine later than that
        monkeypatch.setattr(tokenizer_trial, "MAX_TRIAL_SECONDS", 1.0)
    if "256" in words:
        monkeypatch.setattr(tokenizer_trial, "MAX_TRIAL_BYTES", 1 << 28)
    file = written(make(), tmp_path, **changes)
    for _ in range(2):
        with pytest.raises(UsageError, match=rf"tokenizer.json fails a trial in a child process: .*{words}") as error:
            load_tokenizer(f"hf:{file}")
        assert "\n" not in str(error.value)


def test_table_of_characters_is_bounded(tmp_path):
    rules = tmp_path / "rules.tsv"
    rules.write_text("0061\t" + "0062 " * 5000 + "\n")
    model = foreign_model(normalization_rule_tsv=str(rules), vocab_size=30)
    with pytest.raises(UsageError, match=r"x.model fails .*: it writes .* tokens for a text of length 1"):
        SentencePieceTokenizer(model, "x.model")


def test_every_way_in_has_the_trial(tmp_path):
    """A run's tokenizer, a chat's, and a model folder that is imported."""
    file = written(with_rules(*[("a", "a" * 100)]), tmp_path)
    mark_trusted(file.read_bytes(), "tokenizers")
    load_tokenizer(f"hf:{file}").save(tmp_path / "run" / "tokenizer")
    (tmp_path / "run" / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    for way in (
        lambda: tokenizer_from_folder(tmp_path / "run" / "tokenizer"),
        lambda: load_tokenizer(f"run:{tmp_path / 'run'}"),
        lambda: Chat(tmp_path / "run" / "tokenizer", train_sentencepiece(TEXTS, 380)),
        lambda: open_tokenizer(tmp_path, None),
    ):
        tokenizer_trial._problems.clear()
        for record in (tmp_path / "cache" / "mjax" / "tokenizers").iterdir():
            record.unlink()
        with pytest.raises(UsageError, match=r"tokenizer\.json fails a trial"):
            way()


def test_passed_tokenizer_is_tried_once(tmp_path, trials, cache):
    """Also by later processes, unless others can write where it is remembered."""
    file = written(hf_byte_pairs(), tmp_path)
    for _ in range(2):
        load_tokenizer(f"hf:{file}")
    tokenizer_trial._problems.clear()
    load_tokenizer(f"hf:{file}")
    assert (len(trials), cache.stat().st_mode & 0o777) == (1, 0o700)
    tokenizer_trial._problems.clear()
    cache.chmod(0o777)
    load_tokenizer(f"hf:{file}")
    assert len(trials) == 2


def test_folder_that_cannot_be_written_is_reported(tmp_path, trials, capsys):
    (tmp_path / "cache").write_text("a file")
    tokenizer_trial._warn_once.cache_clear()
    for _ in range(2):
        tokenizer_trial._problems.clear()
        load_tokenizer(f"hf:{written(hf_byte_pairs(), tmp_path)}")
    assert len(trials) == 2
    assert capsys.readouterr().err.count("every start repeats the trial of foreign tokenizers") == 1


def test_expansion_is_bounded_after_the_trial(tmp_path):
    """A rule for a text that no trial holds."""
    file = written(with_rules((Regex("(?<=xy)q(?=z)"), "ab" * 1500)), tmp_path)
    tokenizer = load_tokenizer(f"hf:{file}")
    assert len(tokenizer.encode("q")) == 1
    with pytest.raises(
        UsageError, match=r"the hf tokenizer cannot be used: it writes 3,00\d tokens for a text of length 4"
    ):
        tokenizer.encode("xyqz")


def test_panic_in_a_conversation_is_a_sentence(tmp_path):
    """Its tokenizer passed, before the text that it cannot encode."""
    file = written(with_backtracking(), tmp_path)
    mark_trusted(file.read_bytes(), "tokenizers")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    chat = Chat(tmp_path, train_sentencepiece(TEXTS, 380))
    with pytest.raises(UsageError, match=r"the tokenizer of .*chat_template\.jinja cannot encode a text \(Onig"):
        chat.encode("a" * 1000 + "b")


@pytest.mark.ci
def test_longest_text_of_template_is_encoded(monkeypatch):
    """A tokenizer encodes the longest text of a chat template within the bounds of its trial."""
    monkeypatch.setattr(
        tokenizer_trial, "_trial_texts", lambda rules: [SAMPLE_TEXT * (MAX_TEMPLATE_CHARACTERS // len(SAMPLE_TEXT))]
    )
    encode_texts(b"tokenizers\n" + hf_byte_pairs().to_str().encode())


@pytest.mark.parametrize(
    "rules", [[normalizers.NFKC()], [normalizers.BertNormalizer(), normalizers.Prepend("▁")]], ids=str
)
def test_published_rules_pass(rules):
    library = hf_byte_pairs()
    library.normalizer = normalizers.Sequence(rules)
    encode_texts(b"tokenizers\n" + library.to_str().encode())
