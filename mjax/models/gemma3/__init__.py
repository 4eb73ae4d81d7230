"""Gemma 3, text only (arXiv 2503.19786): its config, its model, and its names in files of Hugging Face.

Nothing outside names this folder. The config is found by its place, and names the model and the table.
"""
