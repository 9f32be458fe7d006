"""The nouns shared by the wire and the brains. Pure: no IO, no clock, no entropy."""
