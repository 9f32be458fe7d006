"""The API that people use, and the threads and sockets behind it."""
