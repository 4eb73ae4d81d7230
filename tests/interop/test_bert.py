"""`mjax convert` of BERT, post-LN (BertForPreTraining) and pre-LN (MegatronBertForPreTraining)."""

import json
import shutil
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from tokenizers import BertWordPieceTokenizer, normalizers, pre_tokenizers

from mjax import cli
from mjax.config import MeshConfig, read_config
from mjax.data.tokenizers import load_tokenizer, tokenizer_from_folder
from mjax.interop.bert import BERT as FAMILY
from mjax.interop.bert import MEGATRON_BERT as MEGATRON_FAMILY
from mjax.interop.convert import abstract_weights
from mjax.interop.settings import config_values, model_config
from mjax.interop.tensor_files import open_tensors
from mjax.interop.tokenizer_files import find_tokenizer
from mjax.interop.weights import find_tensors
from mjax.models.build import build_model
from tests.data.vocabularies import TEXTS, bert_file
from tests.interop.folders import BERT, CONFIG, MEGATRON_BERT, read_folder, tensors_of, write_folder
from tests.interop.test_convert import assert_same, weights_of
from tests.interop.whole_weights import read_weights
from tests.small import named

FAMILIES = {"bert": (BERT, FAMILY), "megatron-bert": (MEGATRON_BERT, MEGATRON_FAMILY)}
WORDS, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder"
HEADS = ("cls.", "bert.pooler.")


@pytest.fixture(scope="module", params=FAMILIES)
def source(request, tmp_path_factory):
    config, _ = FAMILIES[request.param]
    return write_folder(tmp_path_factory.mktemp("source") / request.param, config, tensors_of(config))


@pytest.fixture(scope="module")
def run(source, tmp_path_factory):
    """The run folder made of it; the tests below only read it."""
    run = tmp_path_factory.mktemp("runs") / source.name
    assert cli.main(["convert", "from-hf", str(source), str(run)]) == 0
    return run


def test_every_tensor_finds_its_place(source, run):
    theirs, ours = read_folder(source), named(weights_of(run))
    assert ours["embedding.table"].shape == (384, 12)
    np.testing.assert_array_equal(ours["embedding.table"][:257], theirs[WORDS])
    assert not ours["embedding.table"][257:].any()
    np.testing.assert_array_equal(ours["mlm.bias"][:257], theirs["cls.predictions.bias"])
    np.testing.assert_array_equal(ours["token_types"], theirs["bert.embeddings.token_type_embeddings.weight"])
    layer = "bert.encoder.layer.1"
    for part, name in enumerate(("query", "key", "value")):
        for head in range(3):
            rows = slice(head * 4, head * 4 + 4)
            weight, bias = (theirs[f"{layer}.attention.self.{name}.{what}"] for what in ("weight", "bias"))
            np.testing.assert_array_equal(ours["blocks.attention.qkv.kernel"][1, :, part, head], weight[rows].T)
            np.testing.assert_array_equal(ours["blocks.attention.qkv.bias"][1, part, head], bias[rows])
    out = theirs[f"{layer}.attention.output.dense.weight"]
    np.testing.assert_array_equal(ours["blocks.attention.out.kernel"][1].reshape(12, 12), out.T)
    np.testing.assert_array_equal(ours["order.kernel"], theirs["cls.seq_relationship.weight"].T)
    np.testing.assert_array_equal(ours["pooler.kernel"], theirs["bert.pooler.dense.weight"].T)
    if source.name == "bert":
        np.testing.assert_array_equal(ours["embedding_norm.scale"], theirs["bert.embeddings.LayerNorm.weight"])
        np.testing.assert_array_equal(ours["blocks.mlp_norm.bias"][1], theirs[f"{layer}.output.LayerNorm.bias"])
    else:
        np.testing.assert_array_equal(ours["final_norm.scale"], theirs["bert.encoder.ln.weight"])
        np.testing.assert_array_equal(ours["blocks.mlp_norm.bias"][1], theirs[f"{layer}.ln.bias"])


def test_what_is_exported_is_what_was_imported_bit_for_bit(source, run, tmp_path, capsys):
    assert cli.main(["convert", "to-hf", str(run), str(tmp_path / "out")]) == 0
    config, family = FAMILIES[source.name]
    assert f"as {family.model}," in capsys.readouterr().out
    assert_same(read_folder(tmp_path / "out"), read_folder(source))
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: exported[name] for name in config} == config
    assert not (tmp_path / "out" / "generation_config.json").exists()
    assert cli.main(["convert", "from-hf", str(tmp_path / "out"), str(tmp_path / "again")]) == 0
    assert_same(named(weights_of(tmp_path / "again")), named(weights_of(run)))
    assert read_config(tmp_path / "again" / "config.json") == read_config(run / "config.json")


def test_a_width_that_is_not_given_is_written_out(source):
    config, family = FAMILIES[source.name]
    model = replace(model_config(family, config, "config.json", 128), feed_forward=None)
    assert config_values(family, model)["intermediate_size"] == 48


@pytest.mark.parametrize(
    ("family", "layers", "hidden", "heads", "vocabulary"),
    [(FAMILY, 12, 768, 12, 30522), (MEGATRON_FAMILY, 24, 1024, 16, 29056)],
    ids=["bert", "megatron-bert"],
)
def test_what_config_json_leaves_out_is_as_in_transformers(family, layers, hidden, heads, vocabulary):
    model = model_config(family, {"model_type": family.model_type}, "config.json", 128)
    assert (model.layers, model.hidden, model.heads, model.vocabulary) == (layers, hidden, heads, vocabulary)
    assert (model.sequence, model.mlp_width, model.activation) == (512, 4 * hidden, "gelu_erf")
    assert (model.hidden_dropout, model.attention_dropout, model.layernorm_epsilon) == (0.1, 0.1, 1e-12)


@pytest.mark.parametrize("mesh", [MeshConfig(model=3), MeshConfig(pipe=2, data=2, zero=3)], ids=str)
def test_tensors_are_read_straight_into_the_shards_of_a_mesh(source, run, mesh):
    config, family = read_config(run / "config.json"), FAMILIES[source.name][1]
    tensors = open_tensors(source)
    names = find_tensors(family, tensors, config.model, "source")
    found = read_weights(family, tensors, names, config.model, abstract_weights(config, mesh))
    assert_same(named(found), named(weights_of(run)))


# --- Other forms of the same model ------------------------------------------------------------------------------------


def _stored_twice(tensors):
    """With what is tied, and with what is no weight, as versions of transformers before 4.31 stored it."""
    return tensors | {
        f"{DECODER}.weight": tensors[WORDS].copy(),
        f"{DECODER}.bias": tensors["cls.predictions.bias"].copy(),
        "bert.embeddings.position_ids": np.arange(16)[None],
    }


def _of_tensorflow(tensors):
    names = {name: name.replace("LayerNorm.weight", "LayerNorm.gamma") for name in tensors}
    return {names[name].replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in tensors.items()}


def _without_prefix(tensors):
    return {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("form", [_stored_twice, _of_tensorflow, _without_prefix])
def test_older_files_give_the_same_weights(source, run, tmp_path, form):
    config, _ = FAMILIES[source.name]
    older = write_folder(tmp_path / "in", config, form(tensors_of(config)))
    assert cli.main(["convert", "from-hf", str(older), str(tmp_path / "run")]) == 0
    assert_same(named(weights_of(tmp_path / "run")), named(weights_of(run)))


# --- Without heads ----------------------------------------------------------------------------------------------------


def _encoder(config):
    """As BertModel stores it, without a pooler."""
    tensors = {name: tensor for name, tensor in tensors_of(config).items() if not name.startswith(HEADS)}
    return _without_prefix(tensors)


def test_heads_are_drawn_on_request_and_it_is_said(source, run, tmp_path, capsys):
    config, _ = FAMILIES[source.name]
    encoder = write_folder(tmp_path / "in", config, _encoder(config))
    assert cli.main(["convert", "from-hf", str(encoder), str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert "all of the head for masked tokens, the pooler, the order head; its encoder is complete" in message
    assert "--draw-heads" in message
    assert not (tmp_path / "run").exists()
    assert cli.main(["convert", "from-hf", str(encoder), str(tmp_path / "run"), "--draw-heads"]) == 0
    said = "initialised from seed 1234: the head for masked tokens, the pooler, the order head\n"
    assert said in capsys.readouterr().out
    found, whole = named(weights_of(tmp_path / "run")), named(weights_of(run))
    drawn = {name for name in found if name.startswith(("mlm.", "pooler.", "order."))}
    assert_same({name: found[name] for name in found.keys() - drawn}, {n: whole[n] for n in whole.keys() - drawn})
    initial = named(jax.jit(partial(build_model, 1234, read_config(run / "config.json").model))())
    for name in drawn:
        np.testing.assert_allclose(found[name], initial[name], rtol=1e-6, err_msg=name)


def test_a_head_that_is_there_is_never_drawn(source, run, tmp_path, capsys):
    config, _ = FAMILIES[source.name]
    masked = {n: t for n, t in tensors_of(config).items() if not n.startswith(("bert.pooler.", "cls.seq_relationship"))}
    folder = write_folder(tmp_path / "in", config, masked)  # BertForMaskedLM
    assert cli.main(["convert", "from-hf", str(folder), str(tmp_path / "run"), "--draw-heads"]) == 0
    assert "initialised from seed 1234: the pooler, the order head\n" in capsys.readouterr().out
    found, whole = named(weights_of(tmp_path / "run")), named(weights_of(run))
    for name in ("mlm.transform.kernel", "mlm.bias"):
        np.testing.assert_array_equal(found[name], whole[name])


# --- Tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowercase", [True, False], ids=["uncased", "cased"])
def test_vocab_txt_and_its_case_travel_both_ways(lowercase, tmp_path):
    kind = "bert-uncased" if lowercase else "bert-cased"
    file = bert_file(tmp_path / "vocabulary", lowercase)
    given = load_tokenizer(f"{kind}:{file}")
    config = BERT | {"vocab_size": given.vocabulary}
    source = write_folder(tmp_path / "in", config, tensors_of(config))
    shutil.copy(file, source)
    (source / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowercase}))
    assert cli.main(["convert", "from-hf", str(source), str(tmp_path / "run")]) == 0
    assert tokenizer_from_folder(tmp_path / "run" / "tokenizer").scheme == kind
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "vocab.txt").read_bytes() == file.read_bytes()
    described = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (described["do_lower_case"], described["tokenizer_class"]) == (lowercase, "PreTrainedTokenizerFast")
    assert described["model_max_length"] == 16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] == given.pad
    (tmp_path / "out" / "mjax_tokenizer.json").unlink()  # as it comes from elsewhere
    assert find_tokenizer(tmp_path / "out", None).encode("Ça, déjà vu") == given.encode("Ça, déjà vu")


def _tokenizer_json(folder, lowercase, change=lambda library: None):
    """The tokenizer.json of a BERT in a folder, and the same tokenizer from its vocab.txt."""
    file = bert_file(folder, lowercase)
    given = load_tokenizer(f"bert-{'uncased' if lowercase else 'cased'}:{file}")
    library = BertWordPieceTokenizer(str(file), lowercase=lowercase)
    change(library)
    file.unlink()
    library.save(str(folder / "tokenizer.json"))
    return given


@pytest.mark.parametrize("lowercase", [True, False], ids=["uncased", "cased"])
def test_a_tokenizer_json_of_bert_comes_in_as_bert(lowercase, tmp_path):
    given = _tokenizer_json(tmp_path, lowercase)
    found = find_tokenizer(tmp_path, None)
    assert (found.scheme, found.vocabulary, found.mask, found.eod) == (
        given.scheme,
        given.vocabulary,
        given.mask,
        given.eod,
    )
    assert found.encode_batch(TEXTS) == given.encode_batch(TEXTS)


@pytest.mark.parametrize(
    "change",
    [
        lambda library: library.add_tokens(["<extra>"]),
        lambda library: setattr(library._tokenizer, "normalizer", normalizers.Lowercase()),
        lambda library: setattr(library._tokenizer, "pre_tokenizer", pre_tokenizers.Whitespace()),
    ],
    ids=["a token was added", "accents stay", "other words"],
)
def test_a_tokenizer_json_that_is_not_quite_berts_is_opened_as_it_is(change, tmp_path):
    _tokenizer_json(tmp_path, True, change)
    assert find_tokenizer(tmp_path, None).scheme == "hf"


@pytest.mark.parametrize(
    "said", [None, {}, {"do_lower_case": "yes"}, {"do_lower_case": True, "strip_accents": False}], ids=str
)
def test_a_vocab_txt_of_which_too_little_or_another_thing_is_said_is_no_tokenizer(said, tmp_path):
    bert_file(tmp_path, True)
    if said is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    assert find_tokenizer(tmp_path, None) is None


# --- Refusals ---------------------------------------------------------------------------------------------------------


def _config(**changes):
    return lambda folder, config: write_folder(folder, {**config, **changes}, tensors_of(config))


def _tensors(change):
    def write(folder, config):
        tensors = tensors_of(config)
        change(tensors)
        write_folder(folder, config, tensors)

    return write


def _truncated(folder, config):
    file = write_folder(folder, config, tensors_of(config)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


QUERY, ORDER = "bert.encoder.layer.0.attention.self.query.weight", "cls.seq_relationship.weight"
MLM_NORM = "cls.predictions.transform.LayerNorm"
MISTAKES = {
    # config.json
    "relative positions": (
        _config(position_embedding_type="relative_key"),
        "position_embedding_type is 'relative_key', but mjax supports only 'absolute'",
    ),
    "a decoder": (_config(is_decoder=True), "is_decoder is True, but mjax supports only False"),
    "cross attention": (_config(add_cross_attention=True), "add_cross_attention is True"),
    "one token type": (_config(type_vocab_size=1), "type_vocab_size is 1, but mjax supports only 2"),
    "an untied output layer": (_config(tie_word_embeddings=False), "tie_word_embeddings is False"),
    "an unknown activation": (_config(hidden_act="relu"), "hidden_act is 'relu'"),
    "an unknown setting": (_config(embedding_size=128), "embedding_size is 128, which mjax does not know"),
    "heads that do not divide": (
        _config(num_attention_heads=5), "num_attention_heads 5 does not divide hidden_size 12",
    ),
    "a width that is none": (_config(intermediate_size=None), "intermediate_size is None, which is not a whole number"),
    "pruned heads": (_config(pruned_heads={"0": [1]}), "pruned_heads is {'0': [1]}, which mjax does not know"),
    # tensors
    "a missing tensor": (_tensors(lambda tensors: tensors.pop(QUERY)), f"lacks the tensor {QUERY};"),
    "an encoder that is neither whole nor has heads": (
        _tensors(lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith(HEADS) or n == QUERY]),
        f"lacks the tensor {QUERY}; download",
    ),
    "half a head": (_tensors(lambda tensors: tensors.pop(ORDER)), f"lacks the tensor {ORDER}; download"),
    "a head whose bias is tied to nothing": (
        _tensors(
            lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("cls.predictions")]
            and tensors.update({f"{DECODER}.bias": np.ones(257, np.float32)})
        ),
        "lacks the tensor cls.predictions.",
    ),
    "an unknown tensor": (
        _tensors(lambda tensors: tensors.update({"classifier.weight": np.ones((3, 12), np.float32)})),
        "has a tensor classifier.weight, which",
    ),
    "more layers than config.json says": (_config(num_hidden_layers=1), "ForPreTraining with 1 layers"),
    "a weight of another shape": (
        _config(intermediate_size=30), "intermediate.dense.bias has shape (24,), and config.json asks for (30,)",
    ),
    "an output layer of its own": (
        _tensors(lambda tensors: tensors.update({f"{DECODER}.weight": tensors[WORDS] + 1})),
        f"{DECODER}.weight differs from {WORDS}",
    ),
    "two biases of the output layer": (
        _tensors(lambda tensors: tensors.update({f"{DECODER}.bias": tensors["cls.predictions.bias"] + 1})),
        f"{DECODER}.bias differs from cls.predictions.bias",
    ),
    "a weight under its old and its new name": (
        _tensors(lambda tensors: tensors.update({f"{MLM_NORM}.gamma": tensors[f"{MLM_NORM}.weight"]})),
        f"has both {MLM_NORM}.",
    ),
    "half precision that is not finite": (
        _tensors(lambda tensors: tensors.update({QUERY: np.full((12, 12), np.inf, np.float16)})),
        f"{QUERY} holds numbers that are not finite",
    ),
    "a file that is cut off": (_truncated, "is truncated or not a safetensors file"),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_bert_that_mjax_does_not_understand_is_refused_by_name(name, family, tmp_path, capsys):
    write, expected = MISTAKES[name]
    write(tmp_path / "in", FAMILIES[family][0])
    assert cli.main(["convert", "from-hf", str(tmp_path / "in"), str(tmp_path / "out"), "--draw-heads"]) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.count("\n") == 1, "one line"
    assert not (tmp_path / "out").exists()


def test_layernorms_of_the_other_family_are_refused(tmp_path, capsys):
    write_folder(tmp_path / "in", BERT, tensors_of(MEGATRON_BERT))
    assert cli.main(["convert", "from-hf", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "which is not part of BertForPreTraining with 2 layers" in capsys.readouterr().err


def test_heads_of_a_gpt_cannot_be_drawn(tmp_path, capsys):
    tensors = tensors_of(CONFIG)
    tensors.pop("transformer.ln_f.bias")
    write_folder(tmp_path / "in", CONFIG, tensors)
    assert cli.main(["convert", "from-hf", str(tmp_path / "in"), str(tmp_path / "out"), "--draw-heads"]) == 2
    assert "lacks the tensor transformer.ln_f.bias; download" in capsys.readouterr().err
