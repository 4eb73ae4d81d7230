"""Checkpoints and tokenizers from and to folders of Hugging Face's `transformers`, and from Megatron-LM.

    convert.py            the run of an import, the family of an export, `--rope`
    weights.py            tensors ↔ the weights of a model, read directly into shards
    tensor_files.py       tensors by name: sharded safetensors, read one at a time and written; old pickles on request
    torch_files.py        files of torch.save, read as data
    distributed_files.py  folders of torch.distributed.checkpoint, read as data
    model_folder.py       a folder that is written atomically; its JSON files; its model card
    tokenizer_files.py    the tokenizer of a model folder; files that a run folder only carries for the export
    megatron/             Megatron-LM: checkpoint.py opens a checkpoint, of Megatron-Bridge and of HybridModel too;
                          arguments.py its model; tensors.py names, layouts and shards; export.py the way back

Tables of families are with the models, in `models/huggingface/` and folders of architectures.

Foreign files are data: nothing in them is executed, and mjax rejects unsupported fields and tensors by name.
"""
