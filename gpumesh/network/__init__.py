"""Addresses and sockets. Knows nothing of what travels through them."""
