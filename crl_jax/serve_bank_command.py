"""The words of ``crl bank serve``.

Owns: its arguments. Promises: nothing heavy is imported before the command runs. Does not: serve (``serve_bank``).
"""

from __future__ import annotations

import argparse
import importlib
import pathlib


def add_serve(command: argparse.ArgumentParser) -> None:
    """The arguments of ``crl bank serve``; what it runs is `serve`."""
    command.set_defaults(run=serve)
    command.add_argument("source", type=pathlib.Path, help="a recipe (YAML), or the folder of a run or of a bank")
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings, e.g. bank.top_k=2")
    command.add_argument("--host", default="127.0.0.1", help="another address than this machine's own needs --token-file")
    command.add_argument("--port", type=int, default=8100, help="0 takes a free one")
    command.add_argument("--token-file", type=pathlib.Path, help="a file whose first line clients must send as bearer token")
    command.add_argument("--tls-cert", type=pathlib.Path, help="PEM file: this server's certificate with its chain")
    command.add_argument("--tls-key", type=pathlib.Path, help="PEM file: the key of --tls-cert")
    command.add_argument("--no-extractor", action="store_true", help="serve without a model: read and write, learn from no episodes")
    command.add_argument("--calls", type=int, default=1024, help="calls in flight at most; more are refused")
    command.add_argument("--message-mib", type=int, default=32, help="MiB of one message at most")
    command.add_argument("--drain-s", type=float, default=30.0, help="at the end: the longest wait for distillations")


def serve(args: argparse.Namespace) -> int:
    """Runs the command."""
    module = importlib.import_module("crl_jax.serve_bank")
    options = module.ServeOptions(
        host=args.host,
        port=args.port,
        token_file=args.token_file,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        extractor=not args.no_extractor,
        calls=args.calls,
        message_mib=args.message_mib,
        drain_s=args.drain_s,
    )
    return module.main(args.source, args.overrides, options)
