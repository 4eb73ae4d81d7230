"""Tables for classes of `transformers`: names and layout of their tensors, and settings of their config.json.

    family.py     what a table says, and config.json ↔ ModelConfig
    gpt.py        GPT2LMHeadModel, BloomForCausalLM
    bert.py       BertForPreTraining, MegatronBertForPreTraining, and BERTs with the head of a task
    llama.py      Llama, Mistral, Qwen 2 and 3, OLMo 2
    mixture.py    Mixtral, Qwen 3 MoE, OLMoE

The config of a model names its tables in `families`. An architecture that is a folder has them there.
"""
