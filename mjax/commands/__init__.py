"""One file per command: its flags, its errors and its output. No other folder of mjax imports from here."""
