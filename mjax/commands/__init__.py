"""One file a command: its flags, what it refuses, and what a person sees. Nothing below imports from here."""
