"""``crl simulate``: the schedule of a run at several numbers of environments.

Owns: its arguments and what it prints. Does not: simulate.
"""

from __future__ import annotations

import argparse
import json
import pathlib


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    command.add_argument("overrides", nargs="*", metavar="key=value", help="of the workload, e.g. env_s.mean=0.2 actor.slots=256 max_lag=2")
    command.add_argument("--workload", type=pathlib.Path, help="a YAML file with fields of the workload (default: a made-up machine)")
    command.add_argument("--run", dest="folder", type=pathlib.Path, help="read the durations off this synchronous run, e.g. runs/smoke")
    command.add_argument("--environments", type=_integers, default=(8, 64, 512, 4096), help="comma-separated (default: 8,64,512,4096)")
    command.add_argument("--json", type=pathlib.Path, help="also write everything that was measured here")


def simulate(args: argparse.Namespace) -> int:
    """Every number of environments in turn and beside each other; prints the table and, with more than one mode, who waited for what."""
    from crl_jax.config.parse import ConfigError
    from crl_jax.simulate.fit import config_of, fit, rows_of
    from crl_jax.simulate.outcome import table
    from crl_jax.simulate.schedule import simulate as outcome_of
    from crl_jax.simulate.workload import load_workload

    if args.json is not None and not args.json.absolute().parent.is_dir():  # before what takes minutes
        raise ConfigError(f"--json {args.json}: there is no folder {args.json.parent}: make it first")
    start = None if args.folder is None else fit(rows_of(args.folder), config_of(args.folder))
    workload = load_workload(args.workload, args.overrides, start=start)
    outcomes = [outcome_of(workload.at(count, sync=sync)) for count in args.environments for sync in (True, False)]
    print(table(outcomes))
    print("\nwho waited for what (s, summed over all who waited)")
    for o in outcomes:
        waits = ", ".join(f"{who} {seconds:.1f}" for who, seconds in o.waits_s.items() if seconds >= 0.05)
        print(f"{o.workload.environments:>5} {'sync' if o.workload.sync else 'async':<5}  {waits or 'nobody'}")
    if args.json is not None:
        args.json.write_text(json.dumps([o.to_json() for o in outcomes], indent=1) + "\n", encoding="utf-8")
    return 0


def _integers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers from 1 with commas between them, e.g. 8,64,512")
    return numbers
