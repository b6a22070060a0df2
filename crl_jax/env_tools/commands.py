"""The arguments of ``crl envs ...`` and the function each of them calls.

Owns: names, help texts and defaults of the commands. Promises: nothing heavy is imported before a command runs. Does not: contain what a
command does.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
from collections.abc import Callable
from typing import Any

Command = Callable[[Any, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]

_OPTIONS = "options of the environment, e.g. style=full max_turns=20"


def add_to(actions: Any, command: Command) -> None:
    """Add the commands to the parser of ``crl envs``; ``command`` makes one of a name, a function and a help text."""
    listing = command(actions, "ls", _ls, "list environments: goals, tasks, and whether they can be made here")
    listing.add_argument("prefix", nargs="?", default="", help="only names that start with this")
    listing.add_argument("--families", action="store_true", help="one line for each family")
    check = command(actions, "check", _check, "check that environments keep their promises (exit code 1: one does not)")
    check.add_argument("what", nargs="*", metavar="NAME|FAMILY", help="names from `crl envs ls`, or families")
    check.add_argument("--all", action="store_true", help="every environment of every family")
    check.add_argument("--episodes", type=int, default=20, help="random episodes of each name or family (shared out over its environments)")
    check.add_argument("--strict", action="store_true", help="a family that is not installed is a failure too")
    check.add_argument("--timeout-s", type=float, default=30.0, help="the longest a single call may take")
    check.add_argument("--json", type=pathlib.Path, help="also write the findings here")
    play = _one(command(actions, "play", _play, "play one episode at the keyboard"))
    play.set_defaults(seed=0)
    render = _one(command(actions, "render", _render, "show one episode of a scripted player, as text or as a page"))
    render.add_argument("--player", default="", help="random, expert, follow, ... (default: expert where there is one)")
    render.add_argument("--lesson", default="", help="what `follow` reads (default: the right lesson)")
    render.add_argument("--out", type=pathlib.Path, help="FILE.html to write (default: text in the terminal)")
    prepare = command(actions, "prepare", _prepare, "make now what families otherwise make at first use: games, catalogues, repositories")
    prepare.add_argument("families", nargs="*", metavar="FAMILY", help="default: all that are installed")
    bench = command(actions, "bench", _bench, "measure environments: speed, or success of the scripted players")
    bench.add_argument("what", choices=("speed", "success"))
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the benchmark; --help shows them")


def _one(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    command.add_argument("name", help="a name from `crl envs ls`")
    command.add_argument("options", nargs="*", metavar="key=value", help=_OPTIONS)
    command.add_argument("--task", default=None, help="the id of one of its tasks (default: one that the seed chooses)")
    command.add_argument("--seed", type=int, default=0)
    return command


def _ls(args: argparse.Namespace) -> int:
    return _module("listing").list_envs(args.prefix, families=args.families)


def _check(args: argparse.Namespace) -> int:
    check = _module("checking")
    return check.check_envs(
        args.what, everything=args.all, episodes=args.episodes, strict=args.strict, timeout_s=args.timeout_s, path=args.json
    )


def _play(args: argparse.Namespace) -> int:
    return _module("playing").play_env(args.name, args.options, args.seed, args.task)


def _render(args: argparse.Namespace) -> int:
    render = _module("rendering")
    return render.render_env(args.name, args.options, args.seed, args.task, player=args.player, lesson=args.lesson, path=args.out)


def _prepare(args: argparse.Namespace) -> int:
    return _module("preparing").prepare_envs(args.families)


def _bench(args: argparse.Namespace) -> int:
    return importlib.import_module("crl_jax.benchmarks").run("envs", [args.what, *args.arguments])


def _module(name: str) -> Any:
    return importlib.import_module(f"crl_jax.env_tools.{name}")
