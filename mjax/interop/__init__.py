"""Checkpoints and tokenizers from and to folders of Hugging Face's `transformers`, and from Megatron-LM.

    tensor_files.py     tensors by name: sharded safetensors, read one at a time and written; old pickles on request
    model_folder.py     a folder that is written atomically; its JSON files
    tokenizer_files.py  the tokenizer of a model folder
    carried_files.py    its chat template, special tokens and end ids, which a run folder keeps for the export
    model_card.py       README.md of a model
    settings.py         config.json ↔ ModelConfig, by a table per family
    places.py           where our weights are in foreign tensors: names, and the order of dims
    weights.py          tensors ↔ the weights of a model, read directly into shards
    family.py           a family: its settings and its names
    gpt2.py             GPT2LMHeadModel
    bert.py             BertForPreTraining and MegatronBertForPreTraining
    bloom.py            BloomForCausalLM
    convert.py          `mjax convert from-hf` and `to-hf`
    megatron/           `mjax convert from-megatron`

Foreign files are data: nothing in them is executed, and what mjax does not support is refused by name.
"""
