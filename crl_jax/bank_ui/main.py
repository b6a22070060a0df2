"""``crl bank ui``: the page's server, from the socket to its orderly end.

Owns: the order in which things start. Promises: a port, host, token or bank that cannot be used is one line before anything is served;
SIGINT and SIGTERM end it with code 0. Does not: know the routes (``app``).
"""

from __future__ import annotations

import asyncio
import pathlib
import webbrowser

from crl_jax.bank_tools.commands import decoder
from crl_jax.bank_tools.place import BankInputError, Place
from crl_jax.experience.thread import DaemonThread
from crl_jax.serving.access import check_open_to
from crl_jax.serving.listening import Address, bound
from crl_jax.serving.signals import stop_event
from crl_jax.token_file import read_token


def main(place: Place, *, host: str, port: int, token_file: pathlib.Path | None, open_page: bool) -> int:
    """Serve the page until a signal comes. Raises BankInputError, AccessError, AddressError, StoreError, MissingPackage."""
    if not 0 <= port < 2**16:
        raise BankInputError(f"--port {port}: a port is 1 to 65535, or 0 for a free one")
    token = read_token(token_file)
    check_open_to(host, token)
    return asyncio.run(_serve(place, Address(host, port), token, open_page))


async def _serve(place: Place, address: Address, token: str, open_page: bool) -> int:
    from crl_jax.bank_ui import app as pages  # imports aiohttp
    from crl_jax.bank_ui.library import Library

    with bound(address) as socket:
        library = Library(place)
        now = library.book()
        runner = pages.web.AppRunner(
            pages.make_app(library, token=token, decode=decoder(place)), handler_cancellation=True, access_log=None, shutdown_timeout=2.0
        )
        await runner.setup()
        try:
            with stop_event() as stop:
                await pages.web.SockSite(runner, socket).start()
                host, port = socket.getsockname()[:2]
                url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
                who = "token required" if token else "this machine only"
                what = f"{place.path}, revision {now.revision}, {len(now.live)} entries"
                ready = asyncio.get_running_loop().run_in_executor(DaemonThread("crl-bank-ui"), pages.prepare, library)
                ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # the request that needs it says so
                print(f"crl bank ui: {url} ({who}; {what}; Ctrl-C ends it)", flush=True)
                if open_page:
                    webbrowser.open(url)
                await stop.wait()
        finally:
            await runner.cleanup()
    return 0
