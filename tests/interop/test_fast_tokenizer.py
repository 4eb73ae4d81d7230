"""A tokenizer as `transformers` will open it gives the ids and the text of mjax, or is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer

from mjax.data.tokenizers import SentencePieceTokenizer, load_tokenizer, train_sentencepiece
from mjax.errors import UsageError
from mjax.interop.tokenizer_files import to_fast_tokenizer
from tests.data.vocabularies import LLAMA, NAMES, NASTY, TEXTS, foreign_model, specs

EXACT = [name for name in NAMES if name not in ("sentencepiece, unigram", "sentencepiece, as T5")]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Return by name a tokenizer and its written files, as `transformers` reads them."""
    given = specs(tmp_path_factory.mktemp("tokenizers"))
    ours = {name: load_tokenizer(given[name]) for name in EXACT} | {"trained": train_sentencepiece(TEXTS, 380)}
    # It has pieces for runs of several lengths, as code with its indentation leads to.
    pieces = ["a" * n for n in range(2, 9)] + [" " * n for n in range(2, 9)] + ["ab" * n for n in range(1, 5)]
    ours["runs"] = train_sentencepiece([" ".join(pieces * 5)] * 3, 280)
    options = LLAMA | {"add_dummy_prefix": False, "vocab_size": 400, "user_defined_symbols": ["<mask>", "\n\n", "e"]}
    ours["symbols of the user"] = SentencePieceTokenizer(foreign_model(**options), "x.model")
    return {name: (tokenizer, _opened(to_fast_tokenizer(tokenizer))) for name, tokenizer in ours.items()}


def assert_same(ours, library, text):
    ids = ours.encode(text)
    assert library.encode(text).ids == ids
    assert library.decode(ids, skip_special_tokens=False) == ours.decode(ids)


@pytest.mark.parametrize("name", [*EXACT, "trained", "symbols of the user"])
def test_awkward_texts_have_same_ids(both, name):
    for text in ["a<mask>b <mask>", "the\n\n\nworst", *NASTY.values(), *TEXTS[:3]]:
        assert_same(*both[name], text)


@pytest.mark.parametrize("name", ["trained", "sentencepiece, as LLaMA", "bytes"])
@settings(deadline=None)
@given(text=st.text())
def test_any_text_has_same_ids(both, name, text):
    assert_same(*both[name], text)


@settings(deadline=None)
@given(text=st.text(alphabet="ab \n"))
def test_runs_of_letters_join_in_same_order(both, text):
    assert_same(*both["runs"], text)


def _opened(library):
    library = BackendTokenizer.from_str(library.to_str())
    library.encode_special_tokens = True  # "split_special_tokens" in tokenizer_config.json
    return library


@pytest.mark.parametrize("options", [{}, LLAMA | {"treat_whitespace_as_suffix": True}], ids=str)
def test_model_without_counterpart_is_refused(options):
    ours = SentencePieceTokenizer(foreign_model(**options), "x.model")
    with pytest.raises(UsageError, match=r"transformers.*; export the weights alone with --tokenizer none"):
        to_fast_tokenizer(ours)
