"""`python -m tests.support.other_times NAME=SECONDS ... -- COMMAND ...`: a gpumesh command with other times than those of config.py.

So that a test need not wait for half a minute of silence. What the command starts keeps the usual times: runners have none of these.
"""

from __future__ import annotations

import sys
from typing import List

import gpumesh.config


def main(arguments: List[str]) -> None:
    """Change the times, then run the command."""
    split = arguments.index("--")
    for pair in arguments[:split]:
        name, _, value = pair.partition("=")
        if not hasattr(gpumesh.config, name):
            raise SystemExit(f"config.py has no {name}")
        setattr(gpumesh.config, name, float(value))
    sys.argv = ["gpumesh", *arguments[split + 1 :]]
    from gpumesh.cli.main import main as run  # Now: modules take their times when they are imported.

    run()


if __name__ == "__main__":
    main(sys.argv[1:])
