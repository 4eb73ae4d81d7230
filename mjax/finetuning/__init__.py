"""Fine-tuning a BERT for a labelled task: MNLI, QQP, RACE, SQuAD.

This room is thin. The task reads files and computes metrics from logits (`mjax/tasks/`), the model has a head for it
(`mjax/models/bert/model.py`), and steps, meshes, checkpoints and the progress line come from pre-training
(`mjax/run/`). Here are the seeds with their initial weights, the order of the examples and the report (`tuning.py`),
and the settings (`recipe.py`).
"""
