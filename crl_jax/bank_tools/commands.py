"""The arguments of ``crl bank ...`` and the function each of them calls.

Owns: names, help texts and defaults of the commands; the checks of numbers that need no bank. Promises: nothing heavy is imported before a
command runs. Does not: contain what a command does.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from crl_jax.bank_tools.place import BankInputError, Place, find, find_broken, find_or_new, reading

if TYPE_CHECKING:
    from crl_jax.bank_tools.lineage import Decode
    from crl_jax.config.schema import Config

Command = Callable[[Any, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_to(actions: Any, command: Command) -> None:
    """Add the commands to the parser of ``crl bank``; ``command`` makes one of a name, a function and a help text."""
    _reading_commands(actions, command)
    _writing_commands(actions, command)
    ui = command(actions, "ui", _ui, "look at a bank in the browser: growth, entries, lineage, search, duplicates")
    _bank(ui)
    ui.add_argument("--host", default="127.0.0.1", help="another address than this machine's own needs --token-file")
    ui.add_argument("--port", type=int, default=0, help="0 takes a free one")
    ui.add_argument("--token-file", type=pathlib.Path, help="a file whose first line the page asks for")
    ui.add_argument("--open", action="store_true", help="open the page in the browser")


def _reading_commands(actions: Any, command: Command) -> None:
    ls = _revision(_bank(command(actions, "ls", _ls, "list entries")))
    _filters(ls)
    ls.add_argument(
        "--sort", choices=("newest", "used", "useful"), default="newest", help="useful: by success of the episodes that read it"
    )
    ls.add_argument("--limit", type=int, default=0, help="at most so many (default: all)")
    ls.add_argument("--json", action="store_true", help="one JSON object a line")
    show = _revision(_bank(command(actions, "show", _show, "show one entry whole")))
    show.add_argument("id", help="an entry's id from `crl bank ls`")
    show.add_argument("--json", action="store_true")
    why = _revision(
        _bank(command(actions, "why", _why, "tell the story of one entry: who wrote it from what, whom it guided, what came of it"))
    )
    why.add_argument("id", help="an entry's id from `crl bank ls --retired`")
    why.add_argument("--json", action="store_true")
    stats = _revision(_bank(command(actions, "stats", _stats, "count entries, reads, success and growth")))
    stats.add_argument("--json", action="store_true")
    search = _revision(_bank(command(actions, "search", _search, "search as the actor does, with the reasons of the order")))
    search.add_argument("text", help="the words of a task's goal")
    search.add_argument("--namespace", default="", help="the family that asks (default: the only one)")
    search.add_argument("--k", type=int, default=8, help="entries printed; the arrow marks those that go into the prompt")
    search.add_argument("--json", action="store_true")
    export = _revision(_bank(command(actions, "export", _export, "write entries to a JSONL file")))
    export.add_argument("file", type=pathlib.Path, help="FILE.jsonl, or - for the standard output")
    _filters(export, retired="--all")
    export.add_argument("--overwrite", action="store_true", help="replace the file if it is there")
    verify = _bank(command(actions, "verify", _verify, "check that the file is what was written into it (exit code 1: it is not)"))
    verify.add_argument("--json", action="store_true")
    _bank(command(actions, "snapshot", _snapshot, "make a whole copy beside the bank's file"))


def _writing_commands(actions: Any, command: Command) -> None:
    bring = _new_bank(command(actions, "import", _import, "bring in what `crl bank export` wrote"))
    bring.add_argument("file", type=pathlib.Path, help="FILE.jsonl")
    bring.add_argument("--usage", action="store_true", help="also take how often each entry was read, and with what success")
    _lesson_options(bring)
    seed = _new_bank(command(actions, "seed", _seed, "start a bank from a person's lessons or demonstrations"))
    seed.add_argument("file", type=pathlib.Path, help='a JSONL of {"text", "namespace", "outcome"}, or one lesson a line')
    seed.add_argument(
        "--demonstrations",
        action="store_true",
        help='the file is a JSONL of {"goal", "namespace", "success", "turns": [{"observation", "reply"}], "final_observation"}: the '
        "run's extractor distils them",
    )
    seed.add_argument("--config", type=pathlib.Path, help="the recipe with the extractor, where the bank lies in no run's folder")
    _lesson_options(seed)
    _bank(command(actions, "repair", _repair, "put the last good state in place of a damaged file, which is kept"))
    compact = _bank(command(actions, "compact", _compact, "drop the history that no checkpoint needs"))
    compact.add_argument("--keep-revision", type=int, help="the oldest revision to keep (default: that of the oldest checkpoint, else now)")
    sleep = _bank(command(actions, "consolidate", _consolidate, "merge duplicates and near entries of a stored bank"))
    sleep.add_argument("--dry-run", action="store_true", help="say what would be merged, change nothing")
    sleep.add_argument("--dedup-only", action="store_true", help="only duplicates: needs no extractor")
    sleep.add_argument("--config", type=pathlib.Path, help="the recipe with the extractor, where the bank lies in no run's folder")
    sleep.add_argument("--dedup", type=float, default=0.95, help="the cosine from which two entries are duplicates")
    sleep.add_argument("--near", type=float, default=0.85, help="the cosine from which entries are merged")
    sleep.add_argument("--whole", action="store_true", help="merge all entries of a namespace in their order, not only near ones")
    sleep.add_argument("--passes", type=int, default=1, help="at most so many merge passes")


def _bank(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("folder", type=pathlib.Path, help="the run's folder, e.g. runs/quickstart, or a bank.sqlite file")
    return parser


def _new_bank(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("folder", type=pathlib.Path, help="a run's folder or a bank.sqlite file, made if it is not there")
    return parser


def _revision(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--revision", type=int, metavar="N", help="the bank as it was after N changes (default: now)")
    return parser


def _filters(parser: argparse.ArgumentParser, *, retired: str = "--retired") -> None:
    parser.add_argument("--namespace", default="", help="only entries of this family")
    parser.add_argument("--text", default="", help="only entries with this in their text or id")
    parser.add_argument(retired, dest="retired", action="store_true", help="also entries that have left the bank")


def _lesson_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--namespace", default="", help="for lines that name none (default: the bank's only one)")
    parser.add_argument("--dedup", type=float, help="the cosine from which two entries are duplicates, 0 = none are (default: the run's)")


# ------------------------------------------------------------------------------------------------------------------- reading


def _ls(args: argparse.Namespace) -> int:
    from crl_jax.bank_tools.book import Book
    from crl_jax.bank_tools.listing import Filter, lines

    if args.limit < 0:
        raise BankInputError(f"--limit {args.limit}: give 0 for all, or more")
    with reading(find(args.folder)) as store:
        wanted = Filter(args.namespace, args.text, args.retired, args.sort)
        return _print(lines(Book(store, revision=_at(args)), wanted, limit=args.limit, as_json=args.json))


def _show(args: argparse.Namespace) -> int:
    from crl_jax.bank_tools.book import Book
    from crl_jax.bank_tools.listing import row
    from crl_jax.bank_tools.telling import show

    with reading(find(args.folder)) as store:
        book = Book(store, revision=_at(args))
        return _print([json.dumps(row(book, book.find(args.id)))] if args.json else show(book, args.id))


def _why(args: argparse.Namespace) -> int:
    from crl_jax.bank_tools.book import Book
    from crl_jax.bank_tools.lineage import lineage
    from crl_jax.bank_tools.telling import why

    place = find(args.folder)
    with reading(place) as store:
        book = Book(store, revision=_at(args))
        book.find(args.id)  # before a tokenizer is loaded
        found = lineage(book, args.id, decode=decoder(place))
        return _print([json.dumps(found.to_dict())] if args.json else why(found))


def decoder(place: Place) -> Decode | None:
    """What makes text of the extractor's ids; None where the run's recipe or its tokenizer is not at hand."""
    from crl_jax.config import ConfigError

    try:
        config = place.config()
        if config is None:
            return None
        from crl_jax.models.load import load_codec

        return load_codec(config.extractor.tokenizer).decode
    except (ConfigError, KeyError, TypeError, ValueError, OSError, ImportError):
        return None


def _stats(args: argparse.Namespace) -> int:
    from crl_jax.bank_tools.book import Book
    from crl_jax.bank_tools.statistics import gather, table

    place = find(args.folder)
    with reading(place) as store:
        found = gather(Book(store, revision=_at(args)), place.path)
    return _print([json.dumps(found)] if args.json else table(found))


def _search(args: argparse.Namespace) -> int:
    import asyncio

    from crl_jax.bank_tools import view
    from crl_jax.bank_tools.book import Book

    if args.k < 1:
        raise BankInputError(f"--k {args.k}: give 1 or more")
    place = find(args.folder)
    text = view.check_query(args.text)
    rules = view.Rules.of(place.config())
    with reading(place) as store:
        book = Book(store, revision=_at(args))
        embedder = view.real_embedder()
        ready = view.View.make(book, embedder, rules, make_index=view.real_index)

        async def ask() -> list[dict[str, Any]]:
            seen = ready()
            try:
                return view.explained(await seen.search(args.namespace, text), rules, limit=args.k)
            finally:
                await seen.aclose()

        found = asyncio.run(ask())
    if args.json:
        return _print([json.dumps(found)])
    return _print(view.lines(found) or ["nothing: the actor would play without experience"])


def _export(args: argparse.Namespace) -> int:
    from crl_jax.bank_tools.exchange import export
    from crl_jax.bank_tools.listing import Filter

    wanted = Filter(args.namespace, args.text, args.retired)
    return export(find(args.folder), args.file, wanted, revision=_at(args), overwrite=args.overwrite)


def _verify(args: argparse.Namespace) -> int:
    from crl_jax.bank_tools.upkeep import verify

    return verify(find(args.folder), as_json=args.json)


def _snapshot(args: argparse.Namespace) -> int:
    from crl_jax.bank_tools.upkeep import take_snapshot

    return take_snapshot(find(args.folder))


def _ui(args: argparse.Namespace) -> int:
    from crl_jax.bank_ui.main import main

    return main(find(args.folder), host=args.host, port=args.port, token_file=args.token_file, open_page=args.open)


# ------------------------------------------------------------------------------------------------------------------- writing


def _import(args: argparse.Namespace) -> int:
    from crl_jax.bank_tools.exchange import bring_in

    place = find_or_new(args.folder)
    return bring_in(place, args.file, reason="import", namespace=args.namespace, usage=args.usage, dedup=args.dedup)


def _seed(args: argparse.Namespace) -> int:
    place = find_or_new(args.folder)
    if args.demonstrations:
        from crl_jax.bank_tools.seeding import seed_demonstrations

        return seed_demonstrations(place, args.file, _recipe(args))
    from crl_jax.bank_tools.exchange import bring_in

    return bring_in(place, args.file, reason="seed", namespace=args.namespace, usage=False, dedup=args.dedup)


def _repair(args: argparse.Namespace) -> int:
    from crl_jax.bank_tools.upkeep import repair

    return repair(find_broken(args.folder))


def _compact(args: argparse.Namespace) -> int:
    from crl_jax.bank_tools.upkeep import compact

    return compact(find(args.folder), keep=args.keep_revision)


def _consolidate(args: argparse.Namespace) -> int:
    from crl_jax.bank_tools.consolidate import Plan, consolidate, dry_run

    plan = Plan(duplicate=args.dedup, near=args.near, whole=args.whole, passes=args.passes).checked()
    place = find(args.folder)
    return dry_run(place, plan) if args.dry_run else consolidate(place, plan, config=_recipe(args), dedup_only=args.dedup_only)


def _recipe(args: argparse.Namespace) -> Config | None:
    if args.config is None:
        return None
    from crl_jax.config import load

    return load(args.config)


def _at(args: argparse.Namespace) -> int | None:
    if args.revision is not None and args.revision < 0:
        raise BankInputError(f"--revision {args.revision}: revisions count from 0")
    return args.revision


def _print(lines: Iterable[str]) -> int:
    for line in lines:
        print(line)
    return 0
