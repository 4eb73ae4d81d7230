"""Evaluation of language models, zero-shot, and of fine-tuned BERTs.

Zero-shot: WikiText103, LAMBADA, and plain perplexity. A task turns its file into windows, each a run of tokens with
some unmasked labels (`interface.py`). One program on the mesh scores the windows of all tasks (`scoring.py`), and the
task computes its metrics from the sums.

Labelled: MNLI, QQP, RACE and SQuAD. A task turns its files into rows with labels, and the logits for them into metrics
and prediction files, all by one path (`labelled_task.py`).

So a new task is a file of NumPy and arithmetic, independent of devices.
"""
