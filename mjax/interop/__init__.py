"""Models of others: checkpoints and tokenizers from and to the folders that Hugging Face's `transformers` reads.

    tensor_files.py     tensors by name: sharded safetensors read one at a time and written, old pickles on request
    model_folder.py     a folder that appears whole or not at all; its JSON files
    tokenizer_files.py  the tokenizer that travels along
    gpt2.py             GPT2LMHeadModel: config, names and layouts
    convert.py          `mjax convert from-hf` and `to-hf`

What comes from outside is data: nothing in it is executed, and what mjax does not understand is refused by name.
"""
