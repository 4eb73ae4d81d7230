"""Models of others: checkpoints and tokenizers from and to the folders that Hugging Face's `transformers` reads.

    tensor_files.py     tensors by name: sharded safetensors read one at a time and written, old pickles on request
    model_folder.py     a folder that appears whole or not at all; its JSON files
    tokenizer_files.py  the tokenizer that travels along
    settings.py         config.json ↔ ModelConfig, as a table for each family says
    places.py           where our weights lie in tensors of others: names, and the order of dims
    weights.py          tensors ↔ the weights of a model, straight into their shards
    family.py           what a family is: its settings and its names
    gpt2.py             GPT2LMHeadModel
    bert.py             BertForPreTraining and MegatronBertForPreTraining
    bloom.py            BloomForCausalLM
    convert.py          `mjax convert from-hf` and `to-hf`
    megatron/           `mjax convert from-megatron`

What comes from outside is data: nothing in it is executed, and what mjax does not understand is refused by name.
"""
