"""The command line: ``crl COMMAND ...``.

Owns: argument parsing and exit codes (0 done, 1 the run or check failed, 2 wrong usage or configuration, 75 told to stop and saved: start
it again with --resume, 130 interrupted).
Promises: nothing heavy is imported before a command needs it, so ``crl --help`` answers at once; an error that a person can
mend (``errors``) is one readable message.
Does not: contain logic; each command calls one function.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from crl_jax.bank_tools import commands as bank_commands
from crl_jax.benchmarks import SCRIPTS
from crl_jax.env_tools import commands as env_commands
from crl_jax.serve_bank_command import add_serve
from crl_jax.simulate.commands import add_arguments as add_simulate

if TYPE_CHECKING:
    from crl_jax.config import Config

_OVERRIDES = "settings changed for this run, e.g. run.steps=20 actor.optimizer.lr=1e-5"

_DISK = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
}  # the disk refuses; no fault of the program


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    from crl_jax.errors import UserError
    from envs.api import EnvError, EnvUnavailable

    args = parser().parse_args(_options_last(sys.argv[1:] if argv is None else argv))
    try:
        return int(args.run(args) or 0)
    except (UserError, EnvUnavailable, EnvError) as error:
        print(f"crl: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    except BrokenPipeError:  # the reader of our output (``head``) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in _DISK:
            raise
        print(f"crl: {error} (what was saved is kept: make room or correct the folder, then go on with --resume)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        resume, whole = "a run goes on from its newest checkpoint with --resume", "what was written until then is whole: `crl bank ls`"
        fix = whole if args.command == "bank" else resume
        print(f"crl: interrupted; {fix}", file=sys.stderr)
        return 130


def _options_last(argv: Sequence[str]) -> list[str]:
    """``--flag`` after ``key=value`` and before it mean the same: argparse wants the key=value words together. The words of a benchmark are
    its own, and what is looked for in a bank may hold any character.
    """
    if argv[:1] in (["bench"], ["bank"]) or argv[:2] == ["envs", "bench"]:
        return list(argv)
    settings = [word for word in argv if "=" in word and not word.startswith("-")]
    rest = [word for word in argv if word not in settings]
    at = next((i for i, word in enumerate(rest) if i > 0 and word.startswith("-")), len(rest))
    return [*rest[:at], *settings, *rest[at:]]


def parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    top = argparse.ArgumentParser(prog="crl", description="Complementary reinforcement learning in JAX.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = _with_config(_command(commands, "train", _train, "train an actor and an extractor"))
    train.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint of the run's folder")
    train.add_argument("--role", choices=("actor", "extractor"), help="train this model alone: the other's job and the bank run elsewhere")
    train.add_argument("--coordinator", default="", metavar="HOST:PORT", help="where the processes of this job meet")
    train.add_argument("--process-id", type=int, default=0, metavar="I", help="which of them this is, from 0")
    train.add_argument("--processes", type=int, default=1, metavar="N", help="how many they are; all get the same command but for the id")
    train.add_argument("--profile-steps", metavar="A:B", help="write a profiler trace of steps A to B-1 for TensorBoard")
    evaluate = _with_config(_command(commands, "eval", _eval, "evaluate a checkpoint with and without experience"))
    evaluate.add_argument("--step", type=int, help="checkpoint to evaluate (default: the newest complete one)")
    evaluate.add_argument("--role", choices=("actor",), help="the run was trained with this: the actor alone, and a bank on a server")
    _serve_command(commands)
    warm = _command(commands, "warmstart", _warmstart, "make the micro models' starting weights from scripted play")
    warm.add_argument("--out", type=pathlib.Path, help="safetensors file to write (default: the file that ships with the package)")
    warm.add_argument("options", nargs="*", metavar="key=value", help="fields of the recipe, e.g. steps=260 seed=0")
    study = _with_config(_command(commands, "study", _study, "run several methods and seeds and compare them"))
    study.add_argument("--methods", default="complementary,baseline,static,exp_only", help="comma-separated")
    study.add_argument("--seeds", default="0,1,2", type=_integers, help="comma-separated")
    study.add_argument("--jobs", type=int, default=1, help="runs at a time")
    study.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("docs/results/study_micro.json"), help="result file; a plot is put beside it"
    )
    profile = _command(commands, "profile", _profile, "have a run that is under way take a profiler trace")
    profile.add_argument("folder", type=pathlib.Path, help="the run's folder, e.g. runs/quickstart")
    report = _command(commands, "report", _report, "print the table of a run again")
    report.add_argument("folder", type=pathlib.Path, help="the run's folder, e.g. runs/quickstart")
    report.add_argument("--json", type=pathlib.Path, help="also write the result object here")
    aot = _with_config(
        _command(commands, "aot", _aot, "compile a recipe's programs for a TPU slice, without one, and say whether they fit")
    )
    aot.add_argument("--topology", required=True, help="CHIP:SHAPE, e.g. v5p:4x4x4 or v5e:8x16; 2*v5e:4x4 for two slices")
    aot.add_argument("--only", default="", help="comma-separated programs, e.g. actor.step,decode")
    aot.add_argument("--json", type=pathlib.Path, help="also write the result object here")
    add_simulate(_command(commands, "simulate", _simulate, "show who would wait for whom in a run's schedule, at 8 to 4,096 environments"))
    bench = _command(commands, "bench", _bench, "run a benchmark of the source tree")
    bench.add_argument("name", choices=tuple(SCRIPTS), help="; ".join(f"{name}: {measures}" for name, (_, measures) in SCRIPTS.items()))
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the benchmark; --help shows them")
    _config_commands(commands)
    _env_commands(commands)
    _bank_commands(commands)
    _ckpt_commands(commands)
    _command(commands, "doctor", _doctor, "say what is installed, what is missing and how to install it")
    return top


def _serve_command(commands: Any) -> None:
    serve = _command(
        commands, "serve", _serve, "serve the model of a role: OpenAI's completions over HTTP, or JetStream's protocol over gRPC"
    )
    serve.add_argument("role", choices=("actor", "extractor"), help="whose model, weights, tokenizer and engine sizes")
    _with_config(serve)
    weights = serve.add_mutually_exclusive_group()
    weights.add_argument("--weights", default="", help="a safetensors file or Hugging Face folder (default: what the configuration says)")
    weights.add_argument("--run", dest="folder", type=pathlib.Path, help="take the weights of this run's checkpoint, e.g. runs/quickstart")
    serve.add_argument("--step", type=int, help="the checkpoint of --run (default: the newest complete one)")
    serve.add_argument("--protocol", choices=("openai", "jetstream"), default="openai")
    serve.add_argument("--host", default="127.0.0.1", help="another address than this machine's own needs --token-file")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    serve.add_argument("--token-file", type=pathlib.Path, help="a file whose first line clients must send as bearer token")
    serve.add_argument("--queue", type=int, default=0, help="completions in flight, running or waiting (default: four times the slots)")
    serve.add_argument("--timeout-s", type=float, default=600.0, help="the longest a completion may take")
    serve.add_argument("--weights-folder", type=pathlib.Path, help="allow POST /v1/weights to load safetensors files of this folder")


def _config_commands(commands: Any) -> None:
    config = commands.add_parser("config", help="look at a configuration").add_subparsers(required=True, metavar="ACTION")
    _with_config(_command(config, "show", _config_show, "print the whole resolved configuration as YAML"))
    _with_config(_command(config, "check", _config_check, "check a configuration without running it"))


def _env_commands(commands: Any) -> None:
    envs = commands.add_parser("envs", help="look at, play, check and measure the environments")
    env_commands.add_to(envs.add_subparsers(required=True, metavar="ACTION"), _command)


def _bank_commands(commands: Any) -> None:
    bank = commands.add_parser("bank", help="look at, mend and fill an experience bank").add_subparsers(required=True, metavar="ACTION")
    add_serve(_command(bank, "serve", None, "serve a bank over gRPC, for runs on several machines and for people who use it alone"))
    bank_commands.add_to(bank, _command)


def _ckpt_commands(commands: Any) -> None:
    ckpt = commands.add_parser("ckpt", help="look at, export and delete checkpoints").add_subparsers(required=True, metavar="ACTION")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        made = _command(ckpt, name, run, text)
        made.add_argument("folder", type=pathlib.Path, help="the run's folder, e.g. runs/quickstart")
        return made

    ls = command("ls", _ckpt_ls, "list checkpoints: step, size, time, versions, bank revision, whether complete, which is best")
    ls.add_argument("--metric", default="", help="best by this, e.g. eval/known/with/sampled (default: the run's keep_best.metric)")
    ls.add_argument("--json", action="store_true", help="one JSON object a line")
    show = command("show", _ckpt_show, "say what is in a checkpoint")
    show.add_argument("--step", type=int, help="default: the newest complete one")
    show.add_argument("--leaves", action="store_true", help="every array with its type and shape")
    show.add_argument("--json", action="store_true")
    export = command("export-hf", _ckpt_export, "write a role's weights as a Hugging Face model folder")
    export.add_argument("out", type=pathlib.Path, help="the folder to make")
    export.add_argument("--role", choices=("actor", "extractor"), default="actor")
    export.add_argument("--step", type=int, help="default: the newest complete one")
    export.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    prune = command("prune", _ckpt_prune, "delete old checkpoints; never the newest complete one")
    prune.add_argument("--keep-last", type=int, metavar="N", help="the newest N stay (default: the run's keep_last)")
    prune.add_argument("--keep-best", type=int, metavar="N", help="the best N stay (default: the run's keep_best.count)")
    prune.add_argument("--metric", default="", help="best by this (default: the run's keep_best.metric)")
    prune.add_argument("--dry-run", action="store_true", help="say what would be deleted, delete nothing")


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.set_defaults(run=run)
    return command


def _with_config(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    command.add_argument("config", type=pathlib.Path, help="a YAML file, e.g. configs/quickstart.yaml")
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help=_OVERRIDES)
    return command


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers with commas between them, e.g. 0,1,2") from None


def _load(args: argparse.Namespace, *more: str) -> Config:
    from crl_jax.config import load

    return load(args.config, [*args.overrides, *more])


def _train(args: argparse.Namespace) -> int:
    more: list[str] = []
    if args.profile_steps:
        from crl_jax.config import ConfigError
        from crl_jax.telemetry.profiler import parse_window

        try:
            more.append(f"telemetry.profile_steps={list(parse_window(args.profile_steps))}")
        except ValueError as error:
            raise ConfigError(str(error)) from error
    config = _load(args, *more)
    topology = importlib.import_module("crl_jax.processes").Topology(args.coordinator, args.process_id, args.processes)
    return importlib.import_module("crl_jax.train").main(config, resume=args.resume, role=args.role, topology=topology)


def _eval(args: argparse.Namespace) -> int:
    return importlib.import_module("crl_jax.evaluate").main(_load(args), step=args.step, role=args.role)


def _serve(args: argparse.Namespace) -> int:
    serve, served_role = importlib.import_module("crl_jax.serve"), importlib.import_module("crl_jax.served_role")
    options = serve.ServeOptions(
        host=args.host,
        port=args.port,
        token_file=args.token_file,
        protocol=args.protocol,
        queue=args.queue,
        timeout_s=args.timeout_s,
        weights_folder=args.weights_folder,
    )
    return serve.main(_load(args), args.role, served_role.Source(args.weights, args.folder, args.step), options)


def _warmstart(args: argparse.Namespace) -> int:
    return importlib.import_module("crl_jax.warmstart").main(args.options, path=args.out)


def _study(args: argparse.Namespace) -> int:
    study = importlib.import_module("crl_jax.study")
    return study.main(args.config, args.overrides, methods=args.methods.split(","), seeds=args.seeds, jobs=args.jobs, out=args.out)


def _aot(args: argparse.Namespace) -> int:
    only = [word for word in args.only.split(",") if word]
    report = importlib.import_module("crl_jax.aot.report")
    return report.main(_load(args), args.config, args.topology, only=only, json_path=args.json)


def _simulate(args: argparse.Namespace) -> int:
    return importlib.import_module("crl_jax.simulate.commands").simulate(args)


def _bench(args: argparse.Namespace) -> int:
    return importlib.import_module("crl_jax.benchmarks").run(args.name, args.arguments)


def _profile(args: argparse.Namespace) -> int:
    return _lines(importlib.import_module("crl_jax.profile_run").ask(args.folder))


def _report(args: argparse.Namespace) -> int:
    from crl_jax.telemetry.report import print_report

    return print_report(args.folder, json_path=args.json)


def _config_show(args: argparse.Namespace) -> int:
    from crl_jax.config import to_yaml

    print(to_yaml(_load(args)), end="")
    return 0


def _config_check(args: argparse.Namespace) -> int:
    _load(args)
    print(f"{args.config}: ok")
    return 0


def _ckpt_ls(args: argparse.Namespace) -> int:
    return _lines(importlib.import_module("crl_jax.checkpoint_tools").ls(args.folder, metric=args.metric, as_json=args.json))


def _ckpt_show(args: argparse.Namespace) -> int:
    tools = importlib.import_module("crl_jax.checkpoint_tools")
    return _lines(tools.show(args.folder, args.step, leaves=args.leaves, as_json=args.json))


def _ckpt_export(args: argparse.Namespace) -> int:
    tools = importlib.import_module("crl_jax.checkpoint_tools")
    return _lines(tools.export_hf(args.folder, args.role, args.out, step=args.step, dtype=args.dtype))


def _ckpt_prune(args: argparse.Namespace) -> int:
    tools = importlib.import_module("crl_jax.checkpoint_tools")
    wanted = {"last": args.keep_last, "best": args.keep_best, "metric": args.metric, "dry_run": args.dry_run}
    return _lines(tools.prune(args.folder, **wanted))


def _lines(lines: Sequence[str]) -> int:
    for line in lines:
        print(line)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    del args
    from crl_jax.doctor import doctor

    return doctor()


if __name__ == "__main__":
    sys.exit(main())
