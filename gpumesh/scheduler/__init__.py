"""The brains: pure state machines, events in and actions out. No IO, no clock, no threads."""
