"""Training a BERT further for a task with labels: MNLI, QQP, RACE, SQuAD.

What is here is thin. The task reads files and computes metrics from logits (`mjax/tasks/`), the model has a head for it
(`mjax/models/heads.py`), and steps, meshes, checkpoints and the line on the terminal are those of pre-training
(`mjax/training/`). Between them stand the order of the examples (`batches.py`), the weights that training starts from
(`start.py`), one seed (`seed.py`), all seeds (`tuning.py`), and the report on them (`report.py`).
"""
