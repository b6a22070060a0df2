"""A small bank with a past: two families, an update, a merge, an eviction by a vote, episodes that read entries and some that read none."""

import pathlib

import numpy as np
from experience_toys import HashEmbedder

from crl_jax.experience.bank import Author, Guided
from crl_jax.experience.index import ExactIndex
from crl_jax.experience.store import Store
from crl_jax.experience.writer import WritePolicy, Writer
from crl_jax.records import BankOp, Generation, GenerationKind, OpKind

NASTY = '<img src=x onerror="document.title=1"><script>alert(1)</script> \x1b[31mred\x07'


def generation(number: int, kind=GenerationKind.DISTIL, step=0):
    return Generation(f"g{number:08d}", kind, (1, 2, 3), (4, 5), (-0.5, -0.25), (step, step), step)


def make(path: pathlib.Path, embedder=None) -> dict[str, str]:
    """The ids of its entries by name."""
    embedder = embedder or HashEmbedder()
    store = Store.open(path)
    writer = Writer(store, embedder, lambda: ExactIndex(embedder.dim), WritePolicy(dedup_cosine=2.0))
    writer.load()
    ids: dict[str, str] = {}
    number = 0

    def write(name, op, family="cellar", *, step, outcome=True, kind=GenerationKind.DISTIL, more=()):
        nonlocal number
        number += 1
        author = Author(f"g{number:08d}", step + 1, step, (f"e{number}",) if outcome is not None else (), outcome)
        done = writer.write([op, *more], namespace=family, author=author, generations=[generation(number, kind, step)])
        if done.written:
            ids[name] = done.written[0].id

    def add(text):
        return BankOp(OpKind.ADD, text)

    write("north", add("the stairs lie north"), step=0)
    write("south", add("the stairs lie south"), step=0, outcome=False)
    write("red", add("open the red door"), "kitchen", step=0)
    write("nasty", add(NASTY), "kitchen", step=0)
    writer.observe(
        [
            Guided(ids["north"], True, "p1", "cellar", 1.0),
            Guided(ids["south"], False, "p2", "cellar", 0.0),
            Guided("", False, "p3", "cellar", 0.0),
        ],
        step=1,
    )
    write("east", BankOp(OpKind.UPDATE, "the stairs lie east of the well", (ids["south"],)), step=1)
    writer.observe([Guided(ids["east"], True, "p4", "cellar", 1.0), Guided(ids["east"], False, "p5", "cellar", 0.0)], step=2)
    merge = BankOp(OpKind.MERGE, "north first, then east: there are the stairs", (ids["north"], ids["east"]))
    write("both", merge, step=2, outcome=None, kind=GenerationKind.MERGE)
    writer.observe([Guided(ids["both"], won, f"p{n}", "cellar", float(won)) for n, won in ((6, True), (7, True), (8, False))], step=3)
    writer.observe([Guided("", won, f"p{n}", "kitchen", float(won)) for n, won in ((9, False), (10, True))], step=3)
    write("wrong", add("the red door is a trap"), "kitchen", step=3, outcome=False)
    write("", BankOp(OpKind.DOWNVOTE, "", (ids["wrong"],)), "kitchen", step=4)
    write("again", add("the stairs lie north"), step=4, more=(add("the stairs lie north"),))
    assert np.isfinite(writer.vectors(list(ids.values()))[ids["both"]]).all()
    store.close()
    return ids
