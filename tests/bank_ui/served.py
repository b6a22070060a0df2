"""The page's server on a free port, in the test's own event loop."""

import contextlib

from aiohttp import ClientSession, web
from experience_toys import HashEmbedder

from crl_jax.bank_tools.place import find
from crl_jax.bank_ui.app import make_app
from crl_jax.bank_ui.library import Library
from crl_jax.experience.index import ExactIndex


@contextlib.asynccontextmanager
async def served(path, *, token="", decode=None, make_embedder=HashEmbedder):
    """(client, base address) of a running page."""
    library = Library(find(path), make_embedder=make_embedder, make_index=ExactIndex)
    runner = web.AppRunner(make_app(library, token=token, decode=decode), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with ClientSession() as client:
            yield client, f"http://127.0.0.1:{port}/"
    finally:
        await runner.cleanup()
