"""Fine-tuning a BERT for a labelled task: MNLI, QQP, RACE, SQuAD.

This room is thin. The task reads files and computes metrics from logits (`mjax/tasks/`), the model has a head for it
(`mjax/models/heads.py`), and steps, meshes, checkpoints and the progress line are those of pre-training
(`mjax/run/`). Here are the order of the examples (`batches.py`), the initial weights (`start.py`), one seed
(`seed.py`), all seeds (`tuning.py`), and the report (`report.py`).
"""
