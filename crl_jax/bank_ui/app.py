"""The routes of the page, and who may use them.

Owns: which path answers what, the security headers, errors as one JSON object. Promises: only GET, nothing is changed; without a token the
page answers to this machine's names only; the page itself holds no data, so it is served without the token that its data need; no script
or style but our own files can run in it. Does not: open sockets (``main``) or compute (``panels``).

| route | answers |
|---|---|
| GET / and /static/NAME | the page |
| GET /api/summary, growth, entries, entry/ID, map, search, verify (each below /api) | JSON; ``revision=N``: the bank after N changes |
"""

from __future__ import annotations

import asyncio
import json
import logging
import pathlib
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from crl_jax.bank_tools import view
from crl_jax.bank_tools.book import Book
from crl_jax.bank_tools.lineage import Decode
from crl_jax.bank_tools.listing import Filter, Sort
from crl_jax.bank_tools.place import BankInputError, NotFound
from crl_jax.bank_ui import panels
from crl_jax.bank_ui.library import Library
from crl_jax.errors import MissingPackage, UserError
from crl_jax.serving.access import is_local_request, may_enter

try:
    from aiohttp import web
except ModuleNotFoundError as error:
    raise MissingPackage(f"crl bank ui needs aiohttp ({error}): pip install -e '.[serve]'") from error

_LOG = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
VERIFY_TIMEOUT_S = 600.0
STATIC = pathlib.Path(__file__).with_name("static")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app(library: Library, *, token: str = "", decode: Decode | None = None) -> web.Application:
    """The application; ``token`` is what requests for data must bring (empty: none), ``decode`` makes text of the extractor's ids."""
    app = web.Application(middlewares=[_errors, _entrance(token)], client_max_size=1024)
    files = {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in sorted(STATIC.iterdir()) if path.suffix in _TYPES}

    async def static(http: web.Request) -> web.Response:
        name = http.match_info.get("name", "index.html")
        if name not in files:
            raise NotFound(f"no file {name}")
        body, kind = files[name]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    def api(path: str, work: Callable[[web.Request], Awaitable[Any]]) -> None:
        async def answer(http: web.Request) -> web.Response:
            return web.json_response(await work(http))

        app.router.add_get(f"/api/{path}", answer)

    app.router.add_get("/", static)
    app.router.add_get("/static/{name}", static)
    answers = _Answers(library, decode)
    for path in ("summary", "growth", "entries", "map", "search", "verify"):
        api(path, getattr(answers, path))
    api("entry/{id}", answers.entry)

    async def close(_: web.Application) -> None:
        await library.aclose()

    app.on_cleanup.append(close)
    return app


def prepare(library: Library) -> None:
    """Compute what the first look asks for, and read the history once: the answers are then at hand."""
    answers = _Answers(library, None)
    for key, make in answers.kept.items():
        answers.work(None, key, make)
    library.warm_up()


class _Answers:
    """What each route of the data does: read its query, then work in a thread, off the event loop."""

    def __init__(self, library: Library, decode: Decode | None) -> None:
        self._library = library
        self._decode = decode
        self._verifying = asyncio.Lock()
        self._verdict: tuple[object, Any] | None = None
        self.kept: dict[str, Callable[[Book], Any]] = {
            "summary": lambda book: panels.summary(book, library.place),
            "growth": panels.growth,
            "map": panels.layout,
        }

    async def summary(self, http: web.Request) -> Any:
        at = _revision(http)

        found = await self._remembered(at, "summary")
        return {**found, "embedder_ready": self._library.ready}

    async def growth(self, http: web.Request) -> Any:
        at = _revision(http)
        return await self._remembered(at, "growth")

    async def entries(self, http: web.Request) -> Any:
        at, q = _revision(http), http.query
        by = _one_of(q, "by", ("newest", "used", "useful", "success", "namespace", "text"))
        order = _one_of(q, "order", ("desc", "asc"))
        sort = cast(Sort, by if by in ("used", "useful") else "newest")
        wanted = Filter(q.get("namespace", ""), q.get("text", "")[:500], q.get("retired") == "1", sort)
        offset, limit = _number(q, "offset", 0), _number(q, "limit", 100)

        def work() -> Any:
            return panels.entries(self._library.book(at), wanted, descending=order == "desc", by=by, offset=offset, limit=limit)

        return await asyncio.to_thread(work)

    async def entry(self, http: web.Request) -> Any:
        at, entry_id = _revision(http), http.match_info["id"]
        return await asyncio.to_thread(lambda: panels.entry(self._library.book(at), entry_id, self._decode))

    async def map(self, http: web.Request) -> Any:
        at, near = _revision(http), _decimal(http.query, "near", 0.9)

        def work() -> Any:
            points: panels.Layout = self.work(at, "map", panels.layout)
            return self.work(at, f"map {near}", lambda _: panels.duplicates(points, near))

        return await asyncio.to_thread(work)

    async def search(self, http: web.Request) -> Any:
        at, text = _revision(http), view.check_query(http.query.get("text", ""))
        book = await asyncio.to_thread(self._library.book, at)
        seen = await self._library.view(book)
        family = seen.family(http.query.get("namespace", ""))
        found = await seen.search(family, text)
        rules = self._library.rules
        return {
            "namespace": family,
            "found": view.explained(found, rules, limit=panels.PAGE),
            "k": rules.diversity.k,
            "lambda_count": rules.diversity.lambda_count,
            "min_similarity": rules.diversity.min_similarity,
            "routing": rules.routing.value,
            "embedded_now": seen.embedded_now,
        }

    async def verify(self, http: web.Request) -> Any:
        """The verdict on what is stored now; ``again=1`` asks for a new one."""
        async with self._verifying:
            written = await asyncio.to_thread(self._library.written)
            if self._verdict is None or self._verdict[0] != written or http.query.get("again"):
                self._verdict = written, await self._verified()
            return self._verdict[1]

    async def _verified(self) -> Any:
        """In a process of its own: it computes for seconds, and the page goes on meanwhile."""
        words = [sys.executable, "-m", "crl_jax.cli", "bank", "verify", str(self._library.place.path), "--json"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        try:
            said, complaint = await asyncio.wait_for(process.communicate(), VERIFY_TIMEOUT_S)
        finally:
            if process.returncode is None:
                process.kill()
        try:
            return json.loads(said)
        except ValueError:
            raise UserError(f"`crl bank verify` said nothing: {complaint.decode(errors='replace').strip()[-300:]}") from None

    def work(self, at: int | None, key: str, make: Callable[[Book], Any]) -> Any:
        """What ``make`` makes of the bank at a revision, kept with it under ``key``."""
        book = self._library.book(at)
        return self._library.remembered(book, key, lambda: make(book))

    async def _remembered(self, at: int | None, key: str) -> Any:
        return await asyncio.to_thread(self.work, at, key, self.kept[key])


def _revision(http: web.Request) -> int | None:
    return _number(http.query, "revision", 0) if http.query.get("revision") else None


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise BankInputError(f"{name}={text[:20]!r}: give a whole number, 0 or more")
    return int(text)


def _decimal(query: Mapping[str, str], name: str, default: float) -> float:
    text = query.get(name) or str(default)
    try:
        return float(text)
    except ValueError:
        raise BankInputError(f"{name}={text[:20]!r}: give a number") from None


def _one_of(query: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    found = query.get(name) or known[0]
    if found not in known:
        raise BankInputError(f"{name}={found[:20]!r}: use one of {', '.join(known)}")
    return found


def _entrance(token: str) -> Any:
    @web.middleware
    async def enter(http: web.Request, handler: Handler) -> web.StreamResponse:
        if http.path.startswith("/api/") and not may_enter(http.headers.get("Authorization"), token):
            return _refusal(401, "send the token: Authorization: Bearer TOKEN")
        if not token and not is_local_request(http.headers.get("Host", "")):
            return _refusal(403, "without a token this page answers to the name of this machine only, e.g. 127.0.0.1")
        return await handler(http)

    return enter


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        answer = await handler(request)
    except ConnectionError:  # the reader has gone; nobody reads the answer
        raise
    except NotFound as error:
        answer = _refusal(404, str(error))
    except BankInputError as error:
        answer = _refusal(400, str(error))
    except web.HTTPException as error:
        answer = _refusal(error.status, f"{request.method} {request.path}: {error.reason}")
    except (UserError, ImportError) as error:
        answer = _refusal(503, str(error))
    except TimeoutError as error:
        answer = _refusal(504, str(error) or f"no answer within {VERIFY_TIMEOUT_S:.0f} s")
    except sqlite3.DatabaseError as error:
        answer = _refusal(503, f"the bank's file cannot be read ({error}): `crl bank verify` says what is wrong")
    except Exception as error:
        _LOG.error("%s %s", request.method, request.path, exc_info=error)
        answer = _refusal(500, f"{type(error).__name__}: {error}")
    answer.headers.update(HEADERS)
    return answer


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
