"""One short file a published model. `python train.py --config NAME` runs one; every field can be changed by a flag."""
