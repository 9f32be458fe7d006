"""The script of the chaos run's jobs: leaves a mark, takes a while, and gives its payload's number back."""

import json
import os
import sys
import time


def main() -> None:
    """Payload: number, seconds, and the file for the mark ("" for none)."""
    payload = json.load(sys.stdin)
    if payload["path"]:
        descriptor = os.open(payload["path"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, f"start {payload['number']} {os.getpid()} {time.monotonic():.6f}\n".encode())
        os.close(descriptor)
    time.sleep(payload["seconds"])
    print(json.dumps({"number": payload["number"]}))


if __name__ == "__main__":
    main()
