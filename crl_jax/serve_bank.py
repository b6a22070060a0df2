"""``crl bank serve``: an experience bank behind gRPC, in a process of its own.

Owns: which file and options the bank has, the extractor behind it, the order in which things start and stop. Promises: a port, host, token
or certificate that cannot be used, and a file that another process writes, are found before the bank is opened; searches are served whether
or not the extractor's servers are up: distillations wait for them, each up to its deadline (run.collect_timeout_s), and what the servers do
is said; SIGINT and SIGTERM end it in order and say what waits; a bank whose task failed, or whose extractor cannot be used, ends the
process with that error. Does not: know the protocol (``bank_service``).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crl_jax import bank_lock, lookup, run_folder
from crl_jax.bank_service.durable import DurableManager
from crl_jax.bank_service.limits import Limits
from crl_jax.bank_service.server import BankServer, Tls
from crl_jax.bank_service.service import BankService
from crl_jax.build import keep_compiled_programs, manager_of
from crl_jax.config.load import load
from crl_jax.config.parse import ConfigError
from crl_jax.config.schema import Config
from crl_jax.experience.protocols import Completer
from crl_jax.models.codec import ChatCodec
from crl_jax.models.load import load_codec, load_config
from crl_jax.records import Completion, SamplingParams
from crl_jax.run_bank import open_bank
from crl_jax.run_files import BANK_FILE, CONFIG
from crl_jax.serving.access import check_open_to, is_loopback
from crl_jax.serving.sampler import SamplerClosed
from crl_jax.serving.signals import stop_event
from crl_jax.token_file import read_token

_GRACE_S = 3.0  # for calls in flight at the end
_CONNECT_S = 10.0  # one try to connect to a server of the extractor
_LOOK_S = 10.0  # between two tries, at most
_ATTEMPTS = 3  # of one request, before its server is left out for a while


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Where to listen, who may call, how much at once. ``drain_s``: how long the end waits for distillations."""

    host: str = "127.0.0.1"
    port: int = 8100
    token_file: pathlib.Path | None = None
    tls_cert: pathlib.Path | None = None
    tls_key: pathlib.Path | None = None
    extractor: bool = True
    calls: int = 1024  # a client has 64 on their way at most, and every process of a run is one
    message_mib: int = 32
    drain_s: float = 30.0


def main(source: pathlib.Path, overrides: Sequence[str], options: ServeOptions) -> int:
    """Serves until a signal comes. Raises errors a person can mend: ConfigError, AccessError, AddressError, StoreError."""
    _check(options)
    token = read_token(options.token_file)
    check_open_to(options.host, token)
    tls = _tls(options)
    config, folder = resolve(source, overrides, extractor=options.extractor)
    if token and tls is None and not is_loopback(options.host):
        print("crl bank serve: without --tls-cert the token and all lessons cross the network in the clear", file=sys.stderr)
    keep_compiled_programs(config.run.compile_cache)
    return asyncio.run(_serve(config, folder / BANK_FILE, options, token, tls))


def resolve(source: pathlib.Path, overrides: Sequence[str], *, extractor: bool) -> tuple[Config, pathlib.Path]:
    """The configuration and the folder of the bank of a recipe, of a run's folder, or of a folder with or for a bank alone.

    Raises ConfigError when there is neither, or an ``extractor`` is wanted that nothing names.
    """
    if source.is_dir():
        saved = source / CONFIG
        alone = ["env.family=dungeon", *overrides]  # a configuration names environments; a bank alone does not need them
        config, folder = load(saved, overrides) if saved.is_file() else load(None, alone), source
    else:
        config = load(source, overrides)
        folder = run_folder.of(config)
        folder.mkdir(parents=True, exist_ok=True)
    if extractor and not config.extractor.server.url:
        how = "start it with `crl serve extractor RECIPE` and give extractor.server.url=http://HOST:PORT"
        raise ConfigError(f"{source} names no server for the extractor: {how}, or serve the bank without one: --no-extractor")
    return config, folder


def _check(o: ServeOptions) -> None:
    if not 0 <= o.port < 2**16:
        raise ConfigError(f"--port {o.port}: a port is 1 to 65535, or 0 for a free one")
    if o.calls < 1 or not 1 <= o.message_mib <= 1024 or not 0 <= o.drain_s < math.inf:
        raise ConfigError(f"--calls {o.calls} must be 1 or more, --message-mib {o.message_mib} 1 to 1024, --drain-s {o.drain_s:g} 0 or up")
    if (o.tls_cert is None) != (o.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together: give both files, or none")


def _tls(o: ServeOptions) -> Tls | None:
    if o.tls_cert is None or o.tls_key is None:
        return None
    try:
        return Tls(o.tls_cert.read_bytes(), o.tls_key.read_bytes())
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror}): correct --tls-cert and --tls-key") from error


async def _serve(config: Config, path: pathlib.Path, o: ServeOptions, token: str, tls: Tls | None) -> int:
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(bank_lock.writing(path))
        limits = Limits(message_bytes=o.message_mib * 2**20, calls=o.calls)
        server = BankServer(o.host, o.port, token=token, tls=tls, limits=limits)
        stack.push_async_callback(server.stop, 0.0)  # after an error; a second call does nothing
        new = not path.exists()
        store = open_bank(path)
        stack.callback(store.close)
        wrong: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # why the extractor cannot be used
        manager, extractor = await _manager(config, store, stack, wrong, learns=o.extractor)
        await manager.start()
        stack.push_async_callback(manager.aclose, 0.0)
        await manager.retrieve("", "warm up", peek=True)  # compiles what a lone query runs
        await server.start(BankService(manager, store, limits, extractor=extractor))
        with stop_event() as stop:
            _announce(path, new, manager, f"{'grpcs' if tls else 'grpc'}://{o.host}:{server.port}", token)
            await _ended(stop, manager, wrong)
        await server.stop(_GRACE_S)
        left = await manager.aclose(o.drain_s)
        if left:
            print(f"crl bank serve: {left} episodes are not distilled yet; they wait in {path} for the next start", flush=True)
        for failed in (wrong, manager.failed):
            if failed.done() and (error := failed.exception()) is not None:
                raise error
    return 0


async def _ended(stop: asyncio.Event, manager: DurableManager, wrong: asyncio.Future[None]) -> None:
    """Returns at a signal, when a task of the manager failed, or when the extractor is wrong."""
    asked = asyncio.ensure_future(stop.wait())
    await asyncio.wait({asked, manager.failed, wrong}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()


def _announce(path: pathlib.Path, new: bool, manager: DurableManager, url: str, token: str) -> None:
    """One line when calls are accepted."""
    what = "a new bank" if new else f"{len(manager.state)} entries at revision {manager.state.revision}"
    waiting = int(manager.counts["inbox_at_start"])
    inbox = f", {waiting} episodes {'go on' if manager.learns else 'wait for a start with an extractor'}" if waiting else ""
    learns = "" if manager.learns else ", no extractor"
    guarded = "token required" if token else "no token, this machine only"
    print(f"crl bank serve: {path} ({what}{inbox}{learns}) at {url} ({guarded})", flush=True)


async def _manager(
    config: Config, store: Any, stack: contextlib.AsyncExitStack, wrong: asyncio.Future[None], *, learns: bool
) -> tuple[DurableManager, Callable[[], Mapping[str, float]]]:
    """The manager, and the counters of its extractor's servers."""
    make = functools.partial(DurableManager, learns=learns)
    if learns:
        sampler, codec = await _extractor(config, stack, wrong)
    else:
        sampler, codec = _NoExtractor(), _NoWords()
        config = dataclasses.replace(config, bank=dataclasses.replace(config.bank, merge_every=0, merge_redundancy=0.0))
    manager = manager_of(config, store, lookup.extractor_prompts(config.extractor.prompt), sampler, codec, make)
    return manager, getattr(sampler, "stats", dict)  # none without an extractor


async def _extractor(config: Config, stack: contextlib.AsyncExitStack, wrong: asyncio.Future[None]) -> tuple[Completer, ChatCodec]:
    """Returns at once; the servers are connected to in the background, and ``wrong`` gets the reason why one cannot be used."""
    from crl_jax.role_server import ways  # imports aiohttp
    from crl_jax.serving.remote_edge import Retry
    from crl_jax.serving.spread import Backoff, SpreadSampler

    role, longest_s = config.extractor, 2 * config.run.collect_timeout_s  # a distillation's own deadline, in the manager, comes first
    try:
        codec = load_codec(role.tokenizer)
        own = role.weights == "random" or role.model == "micro"
        model = load_config(role.model, vocab_size=codec.tokenizer.vocab_size if own else None)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"`extractor`: {error}") from error
    connect = ways(
        "extractor",
        role,
        vocab_size=model.vocab_size,
        retry=Retry(attempts=_ATTEMPTS),
        request_timeout_s=longest_s,
        connect_timeout_s=_CONNECT_S,
    )
    sampler = SpreadSampler(
        connect,
        patience_s=longest_s,
        backoff=Backoff(longest_s=_LOOK_S),
        tell=lambda what: print(f"crl bank serve: extractor: {what}", flush=True),
    )
    stack.push_async_callback(sampler.aclose)
    connecting = asyncio.ensure_future(sampler.connected(math.inf))

    def tell_why(done: asyncio.Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None and not isinstance(error, SamplerClosed) and not wrong.done():
            wrong.set_exception(error)

    connecting.add_done_callback(tell_why)
    return sampler, codec


class _NoExtractor:
    """Stands where a sampler would; the service refuses every call that would reach it."""

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Raises RuntimeError."""
        del prompt_ids, params
        raise RuntimeError("this bank is served without an extractor: start it without --no-extractor")


class _NoWords:
    """Stands where a tokenizer would."""

    stop_ids: tuple[int, ...] = ()

    def render(self, messages: Sequence[Any]) -> Sequence[int]:
        """No ids."""
        del messages
        return ()

    def decode(self, ids: Sequence[int]) -> str:
        """No text."""
        del ids
        return ""
