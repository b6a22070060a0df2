"""The page in a real browser: what is seen, done from the keyboard alone, in both colour schemes and on a narrow window."""

import asyncio
import contextlib
import pathlib

import pytest

pytest.importorskip("aiohttp", reason="the page's server needs aiohttp: pip install -e '.[serve]'")
import chromium
from made_bank import NASTY
from served import served

from crl_jax.experience.store import Store

PROGRAM = chromium.find()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(PROGRAM is None, reason=f"no browser: none of {', '.join(chromium.NAMES)} is on the PATH"),
]
READY = "document.querySelector('main')?.dataset.page && !document.querySelector('.skeleton, [aria-busy]')"
PAGES = ("overview", "entries", "search?text=the+stairs+lie+north&namespace=cellar", "map", "entry/{both}")

CONTRAST = pathlib.Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")


@contextlib.asynccontextmanager
async def shown(folder, **kwargs):
    """(page, base address) of a browser beside a running server."""
    async with served(folder, **kwargs) as (_, base), chromium.browser(PROGRAM) as page:
        await page.look()
        yield page, base


async def visit(page, base, route):
    """Go to a part of the page; it is loaded anew only if the browser is elsewhere."""
    if not await page.js(f"location.href.startsWith({base!r})"):
        await page.open(base)
        await page.until(READY, "the first page")
    await page.js(
        f"document.querySelector('main').dataset.page = ''; location.hash = {'#' + route!r}; dispatchEvent(new Event('hashchange'))"
    )
    await page.until(READY, route)


def run(story):
    asyncio.run(asyncio.wait_for(story, 120))


def test_every_page_shows_text_as_text_and_complains_of_nothing(made):
    folder, ids = made

    async def story():
        async with shown(folder, decode=lambda ids: f"tokens {len(ids)} {NASTY}") as (page, base):
            for route in (*PAGES, "entry/{nasty}"):
                await visit(page, base, route.format(**ids))
                assert await page.js("document.title") != "1"
                assert await page.js("document.querySelectorAll('main script, main img').length") == 0
            assert NASTY.split(" ")[0] in await page.js("document.querySelector('.lesson').textContent")
            assert "alert(1)" in await page.js("[...document.querySelectorAll('pre')].map((p) => p.textContent).join()")
            hosts = await page.js("[...new Set(performance.getEntriesByType('resource').map((r) => new URL(r.name).origin))]")
            assert hosts == [base.rstrip("/")]
            refused = await page.js("(() => { try { document.body.innerHTML = '<b>'; return false; } catch (e) { return e.name; } })()")
            assert refused == "TypeError"  # trusted types: the page itself cannot make markup of a text
            assert page.logs == [] or all("TrustedHTML" in line for line in page.logs)

    run(story())


def test_the_way_from_a_question_to_a_lineage_and_back_from_the_keyboard(made):
    folder, _ = made

    async def story():
        async with shown(folder) as (page, base):
            await visit(page, base, "overview")
            await page.key("Tab")
            assert await page.js("document.activeElement.className") == "skip"
            await page.key("/")
            await page.until("document.activeElement.id === 'query'")
            await page.write("the stairs lie north")
            await page.key("Enter")
            await page.until("document.querySelector('.hit.chosen')", "an answer")
            assert "candidates, 1 would be shown" in await page.js("document.getElementById('live').textContent")
            await page.key("ArrowDown")
            assert await page.js("document.activeElement.dataset.id") == await page.js("document.querySelector('.hit').dataset.id")
            assert await page.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            await page.key("2")
            await page.until("document.querySelectorAll('tbody tr').length === 5", "the table")
            await page.key("/")
            await page.write("stairs lie")
            await page.until("document.querySelectorAll('tbody tr').length === 2", "the filtered table")
            await page.key("ArrowDown")
            await page.key("End")
            assert await page.js("document.activeElement === document.querySelector('tbody tr:last-child')")
            await page.key("Home")
            first = await page.js("document.activeElement.dataset.id")
            await page.key("Enter")
            await page.until(f"location.hash.startsWith('#entry/{first}') && document.querySelector('.lineage .node.me')", "the lineage")
            await page.key("Escape")
            await page.until(
                "location.hash.startsWith('#entries') && document.querySelectorAll('tbody tr').length === 2", "the table again"
            )
            await page.key("?", shift=True)
            await page.until("document.getElementById('help').open")
            await page.key("Escape")
            await page.until("!document.getElementById('help').open")
            assert page.logs == []

    run(story())


def test_lineage_sorting_map_and_charts_from_the_keyboard(made):
    folder, ids = made

    async def story():
        async with shown(folder) as (page, base):
            await visit(page, base, f"entry/{ids['both']}")
            nodes = await page.js("[...document.querySelectorAll('.lineage .node-kind')].map((n) => n.textContent)")
            assert nodes == ["Episodes", "Generation", "Replaced", "Replaced", "Entry", "Step 3", "Reward"]
            wires = 1 + 1 + 2 + 2 + 1  # the last is the credit; they are drawn once the boxes have their places
            await page.until(f"document.querySelectorAll('.wires path').length === {wires}", "the wires")
            assert await page.js("document.querySelector('.wire-label').textContent") == "credit +0.33"
            await page.js("document.querySelector('a.node').focus()")
            await page.key("ArrowDown")
            await page.key("Enter")
            await page.until(f"location.hash.startsWith('#entry/{ids['east']}') && document.querySelector('.left-note')", "a parent")
            await visit(page, base, "entries")
            await page.js("document.querySelector('th button[data-key=text]').focus()")
            await page.key("Enter")
            await page.until("document.querySelector('th[aria-sort=descending] button').dataset.key === 'text'")
            await page.key("Enter")
            first = "document.querySelector('tbody tr .text a').textContent"
            await page.until(f"document.querySelector('th[aria-sort=ascending]') && {first}.startsWith('<img')")
            await visit(page, base, "map")
            await page.until("document.querySelector('canvas')?.width > 300", "the map at its size")
            await page.js("document.querySelector('canvas').focus()")
            for key in ("ArrowRight", "ArrowRight", "+"):
                await page.key(key)
            await page.until(
                "!document.querySelector('.map-tip').hidden && document.getElementById('live').textContent.includes('near entries')",
                "the tip of a point",
            )
            await page.key("Enter")
            await page.until("location.hash.startsWith('#entry/x')")
            await visit(page, base, "overview")
            await page.until("document.querySelector('.plot')", "a chart")
            await page.js("document.querySelector('.plot').focus()")
            await page.key("End")
            await page.until("document.querySelector('.chart [aria-live]').textContent.startsWith('Step 4: ')", "the chart's last step")
            assert page.logs == []

    run(story())


def test_time_travel_by_the_arrow_keys_and_back_to_now(made):
    folder, _ = made

    async def story():
        async with shown(folder) as (page, base):
            await visit(page, base, "entries")
            await page.js("document.getElementById('revision').focus()")
            await page.key("Home")
            await page.until(
                "location.hash.includes('at=0') && document.querySelector('.state-title')?.textContent === 'No experience yet'",
                "an empty bank",
            )
            for _ in range(2):
                await page.key("ArrowRight")
            await page.until("location.hash.includes('at=2') && document.querySelectorAll('tbody tr').length === 2", "revision 2")
            assert await page.js("document.getElementById('revision-text').textContent") == "2 of 14"
            await page.js("document.querySelector('.tabs a').click()")
            await page.until(f"{READY} && document.querySelector('.tile-value')?.textContent === '2'", "the past on another page")
            await page.js("document.getElementById('now').click()")
            await page.until("document.querySelector('.tile-value')?.textContent === '5' && document.getElementById('now').hidden", "now")

    run(story())


def test_errors_an_empty_bank_and_a_token_have_their_own_faces(made, tmp_path):
    folder, _ = made

    async def story():
        async with shown(folder, token="secret") as (page, base):
            await page.open(f"{base}#entry/nope")
            await page.until("document.activeElement?.id === 'token'", "the question for the token")
            await page.write("secret")
            await page.key("Enter")
            await page.until("document.querySelector('[role=alert]')?.textContent.includes('no entry')", "the error")
            assert await page.js("document.querySelector('[role=alert] button').textContent") == "Try again"
            await page.send("Network.enable")
            conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
            await page.send("Network.emulateNetworkConditions", offline=True, **conditions)
            await page.js("location.hash = '#overview'")
            await page.until(
                "document.querySelector('.charts [role=alert]')?.textContent.includes('The server does not answer')", "no server"
            )
            await page.send("Network.emulateNetworkConditions", offline=False, **conditions)
            await page.js("document.querySelector('.charts [role=alert] button').click()")
            await page.until("document.querySelectorAll('.charts svg').length === 3", "the charts")
        empty = tmp_path / "empty.sqlite"
        Store.open(empty).close()
        async with shown(empty) as (page, base):
            for route, title in (
                ("overview", "No experience yet"),
                ("entries", "No experience yet"),
                ("search", "No experience yet"),
                ("map", "No points"),
            ):
                await visit(page, base, route)
                await page.until(f"document.querySelector('main .state-title')?.textContent === '{title}'", route)
            assert page.logs == []

    run(story())


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_can_be_read_fits_a_narrow_window_and_every_control_has_a_name(dark, made):
    folder, ids = made

    async def story():
        async with shown(folder, decode=lambda ids: "some words") as (page, base):
            await page.look(dark=dark)
            for route in PAGES:
                await visit(page, base, route.format(**ids))
                await page.until("document.getElementById('verify').textContent.includes('Verified')", "the check")
                found = await page.js(CONTRAST)
                assert found["seen"] > 20
                assert found["bad"] == [], route
                tree = await page.send("Accessibility.getFullAXTree")
                for node in tree["nodes"]:
                    role = node.get("role", {}).get("value")
                    if (
                        role in ("button", "link", "textbox", "searchbox", "combobox", "slider", "checkbox", "application", "image")
                        and not node["ignored"]
                    ):
                        assert node.get("name", {}).get("value"), (route, role)
            for width in (360, 700, 1000):
                await page.look(width=width, height=800, dark=dark)
                for route in PAGES:
                    await visit(page, base, route.format(**ids))
                    assert await page.js("document.documentElement.scrollWidth - innerWidth") <= 0, (route, width)

    run(story())
