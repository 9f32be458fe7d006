"""Objects of one host: a pure table of what is where, files mapped from shared memory, and disk when that is full."""
