"""Prints one table from the JSON files that the peer benchmarks wrote.  Usage: python summarise.py results/*.json"""

import json
import pathlib
import sys

HEAD = ("run", "phase", "reps", "median_cpu_s", "min_cpu_s", "median_s", "tok/cpu-s", "first_s", "load", "rss_mb")

rows = []
for path in map(pathlib.Path, sys.argv[1:]):
    d = json.loads(path.read_text())
    for phase, v in d["phases"].items():
        times = (v["reps"], v["median_cpu_s"], v["min_cpu_s"], v["median_s"], v["tok_per_cpu_s"], v["first_call_s"])
        rows.append((path.stem, phase, *times, d["box"]["load1_max"], d["peak_rss_mb"]))
widths = [max(len(str(r[i])) for r in [HEAD, *rows]) for i in range(len(HEAD))]
for r in [HEAD, *rows]:
    print("  ".join(str(c).ljust(n) for c, n in zip(r, widths, strict=True)))
