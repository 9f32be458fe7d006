"""The `gpumesh` command: one file per command, mounted in main.py. Words for people only; everything it does is done below."""
