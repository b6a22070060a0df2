"""Reading: types, unknown keys, includes, overrides, and the way back."""

import dataclasses
import pathlib

import numpy as np
import pytest

from crl_jax.config import Config, ConfigError, load, to_yaml
from crl_jax.config.load import parse_text
from crl_jax.config.parse import Leaf, build

CONFIGS = sorted((pathlib.Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
MINIMAL = "env: {family: dungeon}\n"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_shipped_config_loads_and_survives_the_way_back(path: pathlib.Path) -> None:
    config = load(path)
    assert parse_text(to_yaml(config)) == config
    assert config.run.name != Config().run.name, "each recipe names its run, so two recipes never share a folder"


def test_there_are_shipped_configs() -> None:
    assert {"quickstart.yaml", "smoke.yaml", "minihack_room.yaml", "smollm2_minihack.yaml", "study_micro.yaml"} <= {p.name for p in CONFIGS}


def test_unknown_key_names_the_nearest_key_and_the_line() -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml:3: unknown key `run\.stepz`; did you mean `run\.steps`\?"):
        parse_text("env: {family: dungeon}\nrun:\n  stepz: 3\n", name="x.yaml")
    with pytest.raises(ConfigError, match=r"unknown key `actr`; did you mean `actor`\?"):
        parse_text("actr: {x: 1}\n" + MINIMAL)
    with pytest.raises(ConfigError, match=r"override 'run\.qqqq=1': unknown key `run\.qqqq`; valid keys here: name, dir"):
        parse_text(MINIMAL, ["run.qqqq=1"])


@pytest.mark.parametrize("bad", ["true", "8.0", "'8'", "null", "[8]", "{a: 1}"])
def test_C04_only_integers_are_integers(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"`run\.group_size` expects an integer, got"):
        parse_text(MINIMAL + f"run: {{group_size: {bad}}}")


def test_C04_numpy_numbers_are_numbers() -> None:
    from crl_jax.config.schema import RunConfig

    built = build(RunConfig, {"group_size": Leaf(np.int64(8), "code"), "deadline_s": Leaf(np.float32(0.5), "code")})
    assert built.group_size == 8
    assert type(built.group_size) is int
    assert type(built.deadline_s) is float
    with pytest.raises(ConfigError, match="integer"):
        build(RunConfig, {"group_size": Leaf(np.bool_(True), "code")})


def test_C09_a_string_is_no_list_of_strings() -> None:
    with pytest.raises(ConfigError, match=r"`env\.names` expects a list, each item a string, got string 'ab'"):
        parse_text(MINIMAL, ["env.names=ab"])
    assert parse_text(MINIMAL, ["env.names=[ab]", "env.family="]).env.names == ("ab",)


def test_scientific_notation_is_a_number_and_a_choice_is_checked() -> None:
    assert parse_text(MINIMAL + "actor: {optimizer: {lr: 1e-6}}").actor.optimizer.lr == 1e-6
    with pytest.raises(ConfigError, match=r"`run\.method` expects one of baseline, static, exp_only, complementary, got string 'ppo'"):
        parse_text(MINIMAL, ["run.method=ppo"])
    with pytest.raises(ConfigError, match="finite number"):
        parse_text(MINIMAL, ["actor.optimizer.lr=.nan"])


def test_overrides_win_left_to_right_over_file_over_base(tmp_path: pathlib.Path) -> None:
    (tmp_path / "base.yaml").write_text(MINIMAL + "run: {steps: 1, seed: 1, name: b}\n")
    (tmp_path / "top.yaml").write_text("base: base.yaml\nrun: {steps: 2, name: t}\n")
    config = load(tmp_path / "top.yaml", ["run.steps=3", "run.steps=4"])
    assert (config.run.steps, config.run.seed, config.run.name, config.env.family) == (4, 1, "t", "dungeon")


def test_a_file_that_is_no_text_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="no UTF-8 text"):
        load(tmp_path / "x.yaml")


def test_include_cycles_and_missing_files_are_errors(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match="leads back"):
        load(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {steps: 1}\nrun: {steps: 2}", ":2: `run` is repeated"),
        ("run: [1]", "is a section of keys"),
        ("- 1", "expected sections"),
        ("run: {a: ", "not valid YAML"),
        ("run: {name: !!python/object/apply:os.system ['true']}", "only plain values"),
    ],
)
def test_malformed_files_are_refused_with_a_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_text(text)


@pytest.mark.parametrize("override", ["run.steps", "=3", "run..steps=3", "run={steps: 1}"])
def test_bad_overrides_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        parse_text(MINIMAL, [override])


def test_an_empty_section_keeps_its_defaults() -> None:
    assert parse_text(MINIMAL + "bank:\n").bank == Config().bank


def test_configs_are_frozen_all_the_way_down() -> None:
    def walk(value: object) -> None:
        assert dataclasses.is_dataclass(value)
        field = dataclasses.fields(value)[0]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, 1)
        for f in dataclasses.fields(value):
            if dataclasses.is_dataclass(inner := getattr(value, f.name)):
                walk(inner)

    walk(Config())
