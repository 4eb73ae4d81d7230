"""One short file per published model. `python train.py --config NAME` runs it; every field is a flag."""
