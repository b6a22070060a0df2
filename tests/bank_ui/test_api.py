"""What the page's server answers, and to whom."""

import asyncio
import hashlib
import json

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="the page's server needs aiohttp: pip install -e '.[serve]'")
from experience_toys import HashEmbedder
from served import served

from crl_jax import cli
from crl_jax.bank_ui import panels
from crl_jax.bank_ui.app import HEADERS, STATIC
from crl_jax.experience.bank import Author
from crl_jax.experience.index import ExactIndex
from crl_jax.experience.store import Store
from crl_jax.experience.writer import WritePolicy, Writer
from crl_jax.records import BankOp, OpKind


def run(story):
    return asyncio.run(asyncio.wait_for(story, 60))


async def get(client, url, status=200, **kwargs):
    async with client.get(url, **kwargs) as answer:
        assert answer.status == status, await answer.text()
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
        return await answer.json()


def writer_of(folder):
    store = Store.open(folder / "bank.sqlite")
    writer = Writer(store, HashEmbedder(), lambda: ExactIndex(64), WritePolicy(dedup_cosine=2.0))
    writer.load()
    return store, writer


def test_every_part_answers_what_the_commands_say(made, capsys):
    folder, ids = made
    assert cli.main(["bank", "stats", str(folder), "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)

    async def story():
        async with served(folder) as (client, base):
            api = f"{base}api/"
            top = await get(client, f"{api}summary")
            assert {name: top[name] for name in ("revision", "entries", "reads", "success", "lift")} == {
                name: stats[name] for name in ("revision", "entries", "reads", "success", "lift")
            }
            growth = await get(client, f"{api}growth")
            assert sum(sum(step["written"].values()) for step in growth["steps"]) == stats["entries_ever"]
            table = await get(client, f"{api}entries?by=used&limit=2")
            assert (table["total"], table["entries"][0]["id"], len(table["entries"])) == (5, ids["both"], 2)
            rest = await get(client, f"{api}entries?by=used&limit=2&offset=4")
            assert len(rest["entries"]) == 1
            low = await get(client, f"{api}entries?by=used&order=asc")
            assert low["entries"][-1]["id"] == ids["both"]
            assert (await get(client, f"{api}entries?text=DOOR&retired=1"))["total"] == 2
            story = await get(client, f"{api}entry/{ids['both']}")
            assert story["writing"]["credit"]["error"] == pytest.approx(0.5443, abs=1e-3)
            assert [r["id"] for r in story["parents"]] == [ids["north"], ids["east"], ids["south"]]
            found = await get(client, f"{api}search?text=the+stairs+lie+north&namespace=cellar")
            assert found["found"][0]["in_prompt"]
            assert (await get(client, f"{api}verify"))["whole"]
            plane = await get(client, f"{api}map?near=0.95")
            assert (len(plane["points"]), len(plane["pairs"]), plane["total"]) == (5, 1, 5)
            a, b, cosine = plane["pairs"][0]
            assert plane["points"][a][4] == plane["points"][b][4] == "the stairs lie north"
            assert cosine == pytest.approx(1.0)

    run(story())


def test_looking_at_the_past_and_at_what_is_written_meanwhile(made):
    folder, ids = made
    before = hashlib.sha256((folder / "bank.sqlite").read_bytes()).digest()

    async def story():
        async with served(folder) as (client, base):
            api = f"{base}api/"
            store = Store.open(folder / "bank.sqlite", read_only=True)
            for revision in (14, 3, 9, 0, 8, 14):
                top = await get(client, f"{api}summary?revision={revision}")
                state = store.at_revision(revision)
                assert (top["revision"], top["entries"], top["newest"]) == (revision, len(state), 14)
                assert top["reads"] == sum(usage.shown for usage in state.usage.values())
            store.close()
            past = await get(client, f"{api}search?text=stairs&namespace=cellar&revision=2")
            assert {row["id"] for row in past["found"]} == {ids["north"], ids["south"]}
            assert hashlib.sha256((folder / "bank.sqlite").read_bytes()).digest() == before
            live, writer = writer_of(folder)
            writer.write([BankOp(OpKind.ADD, "fresh news of the well")], namespace="cellar", author=Author("", 0, 5))
            assert (await get(client, f"{api}summary"))["revision"] == 15
            assert (await get(client, f"{api}entries?text=fresh"))["total"] == 1
            found = await get(client, f"{api}search?text=fresh+news+of+the+well&namespace=cellar")
            assert found["found"][0]["text"] == "fresh news of the well"
            writer.rewind(10)  # the run was resumed: another history with the same numbers
            for n in range(5):
                writer.write([BankOp(OpKind.ADD, f"other future {n}")], namespace="cellar", author=Author("", 0, 5))
            live.close()
            assert (await get(client, f"{api}entries?text=fresh"))["total"] == 0
            assert (await get(client, f"{api}entries?text=other&revision=12"))["total"] == 2

    run(story())


def test_a_repaired_file_is_read_anew(made):
    folder, _ = made

    async def story():
        async with served(folder) as (client, base):
            await get(client, f"{base}api/summary")
            store = Store.open(folder / "bank.sqlite")
            store.rewind(4)
            store.backup(folder / "restored")
            store.close()
            (folder / "restored").replace(folder / "bank.sqlite")
            for name in ("-wal", "-shm"):
                (folder / f"bank.sqlite{name}").unlink(missing_ok=True)
            assert (await get(client, f"{base}api/summary"))["newest"] == 4

    run(story())


def test_a_file_that_is_no_bank_for_a_moment_is_told_and_looked_at_again(made):
    folder, _ = made
    (folder / "kept").write_bytes((folder / "bank.sqlite").read_bytes())

    async def story():
        async with served(folder) as (client, base):
            await get(client, f"{base}api/summary")
            for broken in (b"", b"no bank" * 1000):
                (folder / "other").write_bytes(broken)
                (folder / "other").replace(folder / "bank.sqlite")
                assert "bank.sqlite" in (await get(client, f"{base}api/summary", 503))["error"]
            (folder / "kept").replace(folder / "bank.sqlite")
            assert (await get(client, f"{base}api/summary"))["newest"] == 14
            assert (await get(client, f"{base}api/search?text=stairs&namespace=cellar"))["found"]

    run(story())


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("api/summary?revision=99", 404, "ask for 0 to 14"),
        ("api/summary?revision=-1", 400, "whole number"),
        ("api/summary?revision=1e3", 400, "whole number"),
        ("api/entries?limit=0", 400, "ask for 1 to 200"),
        ("api/entries?limit=100000", 400, "ask for 1 to 200"),
        ("api/entries?by=price", 400, "use one of newest"),
        ("api/entries?namespace=attic", 404, "no namespace"),
        ("api/entry/nope", 404, "no entry"),
        ("api/entry/..%2F..%2Fetc%2Fpasswd", 404, "no entry"),
        ("api/map?near=2", 400, "cosine"),
        ("api/map?near=nan", 400, "cosine"),
        ("api/search", 400, "give 1 to 4000"),
        ("api/search?text=a&namespace=attic", 404, "no namespace"),
        ("static/..%2Fapp.py", 404, "no file"),
        ("static/nope.js", 404, "no file"),
        ("nowhere", 404, "Not Found"),
    ],
)
def test_a_request_that_cannot_be_is_explained(path, status, text, made):
    async def story():
        from yarl import URL

        async with served(made[0]) as (client, base):
            assert text in (await get(client, URL(base + path, encoded=True), status))["error"]

    run(story())


def test_only_get_is_answered(made):
    async def story():
        async with served(made[0]) as (client, base):
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                for path in ("", "api/summary", "api/entries", "api/verify"):
                    async with client.request(method, base + path) as answer:
                        assert answer.status == 405

    run(story())


def test_without_a_token_another_name_for_this_machine_is_refused(made):
    async def story():
        async with served(made[0]) as (client, base):
            for path in ("", "api/summary", "static/app.js"):
                answer = await get(client, base + path, 403, headers={"Host": "attacker.example:80"})
                assert "this machine only" in answer["error"]
            await get(client, f"{base}api/summary", headers={"Host": "localhost:1234"})

    run(story())


def test_with_a_token_the_data_need_it_and_the_page_does_not(made):
    async def story():
        async with served(made[0], token="secret") as (client, base):
            async with client.get(base, headers={"Host": "bank.example"}) as answer:
                assert answer.status == 200
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                await get(client, f"{base}api/summary", 401, headers=headers)
            await get(client, f"{base}api/summary", headers={"Authorization": "Bearer secret", "Host": "bank.example"})

    run(story())


def test_an_embedder_that_is_not_installed_is_named_and_the_rest_goes_on(made):
    def absent():
        raise ImportError("MiniLM is not here: pip install it")

    async def story():
        async with served(made[0], make_embedder=absent) as (client, base):
            assert "pip install it" in (await get(client, f"{base}api/search?text=a&namespace=cellar", 503))["error"]
            await get(client, f"{base}api/summary")

    run(story())


def test_the_page_is_whole_our_own_and_builds_no_html_from_text():
    names = {path.name for path in STATIC.iterdir()}
    assert {"index.html", "style.css", "app.js", "icon.svg"} <= names
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400
        assert "https://" not in text
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            " onclick=",
            "<style",
            " style=",
        ):
            assert forbidden not in text, f"{path.name} has {forbidden}"
        if path.suffix == ".js":
            for imported in [line.split('"')[-2] for line in text.splitlines() if line.startswith("import ")]:
                assert imported.removeprefix("./") in names


def test_the_map_is_the_principal_plane():
    rng = np.random.default_rng(1)
    vectors = rng.standard_normal((60, 12)).astype(np.float32) * np.array([9, 4, *[0.3] * 10], np.float32) + 3
    places, shares = panels.plane(vectors)
    centred = vectors - vectors.mean(axis=0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    for axis in (0, 1):
        assert abs(np.corrcoef(places[:, axis], left[:, axis])[0, 1]) == pytest.approx(1.0, abs=1e-4)
        assert (places[:, axis].min(), places[:, axis].max()) == (pytest.approx(-1, abs=1e-5), pytest.approx(1, abs=1e-5))
        assert shares[axis] == pytest.approx(values[axis] ** 2 / (values**2).sum(), abs=1e-3)
    assert panels.plane(np.ones((3, 4), np.float32))[0].tolist() == [[0.0, 0.0]] * 3
    assert panels.plane(np.zeros((0, 1), np.float32))[0].shape == (0, 2)
    assert panels.plane(rng.standard_normal((4, 1)).astype(np.float32))[0].shape == (4, 2)


def test_near_pairs_are_those_of_a_whole_comparison():
    rng = np.random.default_rng(2)
    vectors = rng.standard_normal((40, 3)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    families = ["a" if n % 3 else "b" for n in range(40)]
    found = panels.near_pairs(vectors, families, 0.99)
    expected = {
        (a, b) for a in range(40) for b in range(a + 1, 40) if families[a] == families[b] and float(vectors[a] @ vectors[b]) >= 0.99
    }
    assert {(int(a), int(b)) for a, b, _ in found} == expected
    assert [c for *_, c in found] == sorted((c for *_, c in found), reverse=True)
