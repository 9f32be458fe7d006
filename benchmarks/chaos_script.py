"""The script of the chaos run's jobs: leaves marks as chaos_tasks.mark does, takes a while, and gives its payload's number back."""

import json
import os
import sys
import time


def mark(word, payload):
    """One line at the end of a file that all share."""
    descriptor = os.open(payload["path"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{word} {payload['number']} {os.getpid()} {time.monotonic():.6f}\n".encode())
    os.close(descriptor)


def main():
    """Payload: number, seconds, and the path of the file."""
    payload = json.load(sys.stdin)
    mark("start", payload)
    time.sleep(payload["seconds"])
    mark("end", payload)
    print(json.dumps({"number": payload["number"]}))


if __name__ == "__main__":
    main()
