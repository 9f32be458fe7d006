"""A script for `gpumesh submit`: throws darts at a square, and tells what part of them hit the circle in it.

    gpumesh submit examples/job/estimate_pi.py --payloads examples/job/seeds.csv --wait

Each line of the table is one task. Its payload comes as JSON on standard input, and the last line printed, as JSON, is the task's result;
all lines before it are its log.
"""

import json
import random
import sys

payload = json.load(sys.stdin)
darts = payload.get("darts", 1_000_000)
dice = random.Random(payload["seed"])

hits = 0
for _ in range(darts):
    x, y = dice.random(), dice.random()
    hits += x * x + y * y < 1.0

print("threw", darts, "darts with seed", payload["seed"])
print(json.dumps({"pi": 4 * hits / darts}))
