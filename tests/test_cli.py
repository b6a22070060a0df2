"""The command line: answers fast, explains mistakes, calls one function each."""

import errno
import io
import pathlib
import subprocess
import sys
import types

import pytest

from crl_jax import cli
from crl_jax.config import Config, ConfigError
from crl_jax.config.load import parse_text
from crl_jax.doctor import Need, conflicts, doctor
from crl_jax.records import BankOp, OpKind
from crl_jax.telemetry.tracker import JsonlTracker
from envs.api import EnvError, EnvUnavailable

QUICKSTART = str(pathlib.Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml")


def test_help_and_config_need_no_jax() -> None:
    code = (
        "import sys; from crl_jax import cli; cli.parser().format_help(); "
        f"assert cli.main(['config', 'check', {QUICKSTART!r}]) == 0; assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_config_show_prints_what_loads_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", QUICKSTART, "run.steps=7"]) == 0
    assert parse_text(capsys.readouterr().out).run.steps == 7


def test_a_configuration_error_is_one_message_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check", QUICKSTART, "run.stepz=7"]) == 2
    assert capsys.readouterr().err == "crl: override 'run.stepz=7': unknown key `run.stepz`; did you mean `run.steps`?\n"
    assert cli.main(["train", QUICKSTART, "--profile-steps", "5"]) == 2
    with pytest.raises(SystemExit) as stop:
        cli.main(["trian"])
    assert stop.value.code == 2


def test_train_passes_the_configuration_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Config, bool]] = []

    def train_main(config: Config, *, resume: bool, **_: object) -> int:
        calls.append((config, resume))
        return 3

    monkeypatch.setitem(sys.modules, "crl_jax.train", types.SimpleNamespace(main=train_main))
    assert cli.main(["train", QUICKSTART, "run.steps=5", "--resume", "--profile-steps", "3:5"]) == 3
    ((config, resume),) = calls
    assert (config.run.steps, config.telemetry.profile_steps, resume) == (5, (3, 5), True)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        pytest.param(ConfigError("fix it"), 2, "crl: fix it\n", id="configuration"),
        pytest.param(EnvUnavailable("pip install it"), 1, "crl: pip install it\n", id="environment"),
        pytest.param(EnvError("its worker is gone: raise env.call_timeout_s"), 1, "raise env.call_timeout_s", id="environment-failed"),
        pytest.param(OSError(errno.ENOSPC, "No space left on device"), 1, "make room", id="full-disk"),
        pytest.param(KeyboardInterrupt(), 130, "--resume", id="ctrl-c"),
    ],
)
def test_what_a_person_can_mend_is_said_in_one_line(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train_main(config: Config, *, resume: bool, **_: object) -> int:
        raise error

    monkeypatch.setitem(sys.modules, "crl_jax.train", types.SimpleNamespace(main=train_main))
    assert cli.main(["train", QUICKSTART]) == code
    text = capsys.readouterr().err
    assert said in text
    assert len(text.splitlines()) == 1


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def train_main(config: Config, *, resume: bool, **_: object) -> int:
        raise FileNotFoundError(errno.ENOENT, "a file of the package")

    monkeypatch.setitem(sys.modules, "crl_jax.train", types.SimpleNamespace(main=train_main))
    with pytest.raises(FileNotFoundError):
        cli.main(["train", QUICKSTART])


def test_report_reads_a_run_folder(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == 1
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"success/guided": 0.5, "success/free": 0.25})
    tracker.close()
    (tmp_path / "config.yaml").write_text("run: {seed: 9}\n")
    assert cli.main(["report", str(tmp_path), "--json", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    assert "seed 9" in out
    assert out.splitlines()[-1].startswith('{"name": "success_guided_last_bucket", "value": 0.5')
    assert (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        pytest.param("", "holds no step yet", id="empty"),
        pytest.param('{"kind": "metrics"}\n', "holds no step yet", id="no-step"),
        pytest.param("garbage\n", "metrics.jsonl:1 is no metrics line", id="garbage"),
    ],
)
def test_a_broken_metrics_file_is_explained(metrics: str, said: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(metrics)
    assert cli.main(["report", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("config", ["", "run: [", "run: {}", "[]"])
def test_a_report_needs_no_readable_configuration(config: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "metrics", "step": 1, "success/free": 0.5}\n{"step": 2, "ki')
    (tmp_path / "config.yaml").write_text(config)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "1 steps" in capsys.readouterr().out


def test_envs_are_listed_and_unknown_ones_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["envs", "ls", "dungeon/"]) == 0
    assert "dungeon/amber_cellar" in capsys.readouterr().out
    assert cli.main(["envs", "ls", "zzz"]) == 1
    assert cli.main(["envs", "play", "dungeon/amber_celar"]) == 2
    assert "dungeon/amber_cellar" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["max_turns=x"], "max_turns='x': use a whole number, 1 or more"),
        (["max_turns=0"], "max_turns=0: use a whole number, 1 or more"),
        (["style=zzz"], "style='zzz': use one of full, compact"),
        (["style=["], "style='[': use one of full, compact"),
        (["size=3"], "dungeon size 3: use 6 to 18"),
        (["colour=red"], "unknown option 'colour': use one of style, grammar, max_turns, size, kind, hazards"),
        (["style"], "option 'style': write key=value"),
        (["--seed", "-1"], "seed -1: use a whole number from 0 to 2^63 - 1"),
    ],
)
def test_options_that_cannot_be_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("minihack")
    assert cli.main(["envs", "play", "dungeon/amber_cellar", *words]) == 2
    text = capsys.readouterr().err
    assert said in text
    assert len(text.splitlines()) == 1


def test_an_environment_can_be_played(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("minihack")
    monkeypatch.setattr(sys, "stdin", io.StringIO("north\nfly\n"))
    assert cli.main(["envs", "play", "dungeon/amber_cellar", "max_turns=2", "--seed", "1"]) == 1
    out = capsys.readouterr().out
    assert "not a valid action" in out
    assert out.rstrip().endswith("no success")


def test_the_bank_of_a_run_is_shown(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    from crl_jax.experience import bank
    from crl_jax.experience.store import Change, Store
    from crl_jax.run_files import BANK_FILE

    assert cli.main(["bank", "ls", str(tmp_path)]) == 1
    assert not (tmp_path / BANK_FILE).exists(), "looking must not create a bank"
    capsys.readouterr()
    store = Store.open(tmp_path / BANK_FILE)
    author, op = bank.Author("g1", 2, 3, ("e1",)), BankOp(OpKind.ADD, "stairs lie north\nalways")
    applied = bank.apply(store.load(), op, namespace="dungeon", author=author, op_index=0)
    store.commit([Change(0, op, "dungeon", author, 0, applied)])
    store.close()
    assert applied.written is not None
    assert cli.main(["bank", "ls", str(tmp_path)]) == 0
    assert f"{applied.written.id}  dungeon  step 3  0/0  stairs lie north" in capsys.readouterr().out
    assert cli.main(["bank", "show", str(tmp_path), applied.written.id]) == 0
    assert "generation  g1 (operation 0)" in capsys.readouterr().out
    assert cli.main(["bank", "show", str(tmp_path), "nope"]) == 1
    assert cli.main(["bank", "stats", str(tmp_path)]) == 0
    assert "entries      1" in capsys.readouterr().out


def test_doctor_names_the_line_that_installs_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    optional = Need("flying", ("no-such-package-here",), "pip install wings")
    assert doctor((optional,)) == 0
    assert "absent   flying: no no-such-package-here   ->  pip install wings" in capsys.readouterr().out
    assert doctor((Need("flying", ("no-such-package-here",), "pip install wings", required=True),)) == 1
    assert conflicts("1.4.2", "2.21.0")
    assert not conflicts("1.4.2", "2.20.0")
    assert not conflicts("1.4.2", None)
