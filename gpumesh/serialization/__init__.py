"""User values, functions and exceptions as bytes and back: the only floor that pickles."""
