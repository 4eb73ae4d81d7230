"""`train.py --profile`: a trace of some steps, a table of where their time went, and the memory they took."""
