"""The story of an entry, and a search that is the actor's own."""

import asyncio
import json

import pytest
from experience_toys import HashEmbedder, episode
from manager_toys import add, build, teach

from crl_jax import cli
from crl_jax.bank_tools import view
from crl_jax.bank_tools.book import Book
from crl_jax.bank_tools.lineage import lineage
from crl_jax.bank_tools.place import find, reading
from crl_jax.experience.index import ExactIndex
from crl_jax.experience.reader import Ranked, Routing, Shown
from crl_jax.experience.retrieve import Diversity, Standing
from crl_jax.experience.store import Store
from crl_jax.experience.writer import WritePolicy


def why(capsys, folder, entry_id):
    assert cli.main(["bank", "why", str(folder), entry_id]) == 0
    text = capsys.readouterr().out
    assert cli.main(["bank", "why", str(folder), entry_id, "--json"]) == 0
    return text, json.loads(capsys.readouterr().out)


def test_a_merged_entry_tells_its_whole_story(made, capsys):
    folder, ids = made
    text, found = why(capsys, folder, ids["both"])
    assert found["written_as"] == "merge"
    assert [(r["id"], r["distance"], r["live"]) for r in found["parents"]] == [
        (ids["north"], 1, False),
        (ids["east"], 1, False),
        (ids["south"], 2, False),
    ]
    assert [(g[0], g[3]) for g in found["guided"]] == [("p6", True), ("p7", True), ("p8", False)]
    assert found["writing"]["credit"] == {"episodes": 3, "total": 1, "mean": pytest.approx(1 / 3), "waiting": None, "trained": 0}
    assert "mean direct reward +0.33 ± 0.54 (one standard error) over 3 episodes" in text
    assert f"  {ids['south']}  addition, no longer in the bank" in text
    assert "step 3: 3 episodes, 2 succeeded, mean reward +0.67" in text
    assert text.splitlines()[-1].endswith("in the bank; read 3 times, 2 successes, last at step 3; utility 0.60")


@pytest.mark.parametrize(
    ("name", "left", "heir"),
    [("south", "updated into ", "east"), ("north", "merged into ", "both"), ("wrong", "voted out", None)],
)
def test_how_an_entry_left(name, left, heir, made, capsys):
    folder, ids = made
    text, found = why(capsys, folder, ids[name])
    assert found["left"][2] == left + (ids[heir] if heir else "")
    assert f"{found['left'][2]}, at revision {found['left'][0]}" in text.splitlines()[-1]


def test_a_generation_is_credited_once_for_an_episode_that_read_two_of_its_entries(small, tmp_path):
    async def story():
        store = Store.open(tmp_path / "bank.sqlite")
        async with build(lambda prompt: add("lamp left", "lamp right"), store=store) as manager:
            await teach(manager, "one")
            first, second = manager.state.space("room")
            await manager.observe([episode("e1", shown=(first, second)), episode("e2", shown=(first,), success=False)])
            expected = json.loads(manager.buffer.to_json())["waiting"][0]
        store.close()
        return first, expected

    first, (generation, total, count, _) = asyncio.run(story())
    with reading(find(tmp_path / "bank.sqlite")) as store:
        found = lineage(Book(store), first)
    assert found.writing is not None
    assert (found.writing.id, found.writing.credit.total, found.writing.credit.episodes) == (generation, total, count) == (generation, 0, 2)
    assert found.writing.credit.waiting == (0.0, 2)


def test_a_long_chain_of_updates_is_told_without_recursion(small, tmp_path):
    from crl_jax.experience.bank import Author
    from crl_jax.experience.writer import Writer
    from crl_jax.records import BankOp, OpKind

    store = Store.open(tmp_path / "bank.sqlite")
    writer = Writer(store, HashEmbedder(), lambda: ExactIndex(64), WritePolicy(dedup_cosine=2.0))
    last = ()
    for n in range(400):
        last = (writer.write([BankOp(OpKind.UPDATE, f"word{n}", last)], namespace="a", author=Author("", 0, n)).written[0].id,)
    store.close()
    with reading(find(tmp_path / "bank.sqlite")) as store:
        found = lineage(Book(store), last[0])
    assert len(found.parents) == 399
    assert found.parents[-1].distance == 399


@pytest.mark.parametrize("routing", list(Routing))
def test_search_shows_what_evaluation_would_show_and_changes_nothing(routing, small, tmp_path):
    diversity = Diversity(k=2, recent_steps=2, lambda_count=0.7, utility_weight=1.5, min_similarity=0.1)
    rules = view.Rules(diversity, routing)

    async def story():
        store = Store.open(tmp_path / "bank.sqlite")
        async with build(store=store, diversity=diversity, routing=routing) as manager:
            await teach(manager, "red door north", "red door south", "blue lamp", "red lamp west")
            await teach(manager, "red door cellar", namespace="cellar")
            for step in range(1, 5):
                manager.on_step(step)
                shown = await manager.retrieve("room", "red door")
                await manager.observe([episode(f"e{step}", shown=tuple(s.id for s in shown), success=step % 2 == 0)])
            before = store.revision
            expected = await manager.retrieve("room", "red door", peek=True)
        with reading(find(tmp_path / "bank.sqlite")) as same:
            seen = view.View.make(Book(same), HashEmbedder(), rules, make_index=ExactIndex)()
            found = view.explained(await seen.search("room", "red door"), rules, limit=0)
            await seen.aclose()
            assert same.revision == before
        store.close()
        return expected, found

    expected, found = asyncio.run(asyncio.wait_for(story(), 60))
    assert [row["id"] for row in found if row["in_prompt"]] == [shown.id for shown in expected]
    scored = [row for row in found if row["score"]]
    assert [row["score"]["total"] for row in scored] == sorted((row["score"]["total"] for row in scored), reverse=True)
    for row in scored:
        parts = row["score"]
        assert parts["total"] == pytest.approx(sum(parts[name] for name in ("rank", "showings", "recent", "utility", "penalty")))
        assert parts["rank"] == 1 - row["similarity_rank"]
    assert any("shown at step" in row["why"] for row in found)


def test_search_names_what_is_below_a_floor(made, capsys):
    folder, _ = made
    assert cli.main(["bank", "search", str(folder), "the stairs lie north", "--namespace", "cellar", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0]["similarity"] == pytest.approx(1.0)
    assert found[0]["in_prompt"]
    assert not found[1]["in_prompt"]
    assert cli.main(["bank", "search", str(folder), "the stairs lie north", "--namespace", "cellar"]) == 0
    assert capsys.readouterr().out.startswith("→  1  ")
    low = Ranked(Shown("x", "t", 0.2), Standing(), None)
    assert view.reason(low, 0, Diversity(min_similarity=0.5)) == "never shown: similarity 0.200 is below bank.min_similarity 0.5"
