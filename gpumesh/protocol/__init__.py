"""The wire, pure: bytes in, messages out, and back. No socket, no clock, no entropy, no pickle."""
