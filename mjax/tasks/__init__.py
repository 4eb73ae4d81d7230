"""What a language model is measured by without training it further: WikiText103, LAMBADA, and plain perplexity.

A task turns its file into windows, each a run of tokens of which some labels count (`interface.py`). The windows of all
tasks are scored by one program on the mesh (`scoring.py`), and the task makes its figures of the sums. So a new task is
a file of NumPy and arithmetic that knows nothing of devices.
"""
