"""Tokenizers, Megatron's indexed datasets and its order of samples, from text to batches, in NumPy alone.

    text ── prepare ──▶ PREFIX.bin, PREFIX.idx ── GPTDataset ── BlendedDataset ──▶ sample i ── Batches ──▶ batches
           tokenizers   indexed                   samples       blend                          batches

For BERT a sequence is a sentence, and BertDataset (bert) stands in place of GPTDataset.

Nothing here imports JAX, and no object has a read position. A batch depends on the data, the seed and the step, never
on the mesh or on history, so a step number is enough to resume a run.
"""
