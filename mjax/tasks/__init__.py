"""Evaluation: of language models as they are, and of BERTs after being trained further.

Without training further: WikiText103, LAMBADA, and plain perplexity. A task turns its file into windows, each a run of
tokens of which some labels count (`interface.py`). The windows of all tasks are scored by one program on the mesh
(`scoring.py`), and the task computes its metrics from the sums.

With labels: MNLI, QQP, RACE and SQuAD. A task turns its files into rows with labels, and the logits for them into
metrics and files of predictions, all by one path (`labelled_task.py`).

So a new task is a file of NumPy and arithmetic that knows nothing of devices.
"""
