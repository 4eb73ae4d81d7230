"""Training a BERT further for a task with labels: MNLI, QQP, RACE, SQuAD.

What is here is thin. The task reads files and makes figures of scores (`mjax/tasks/labelled.py`), the model has a head
for it (`mjax/models/heads.py`), and steps, meshes, checkpoints and the line on the terminal are those of pre-training
(`mjax/training/`). Between them stand the order of the examples (`batches.py`), the weights that training starts from
(`start.py`), the scores of a validation set (`scores.py`), one seed (`seed.py`), and the report on all (`report.py`).
"""
