"""Reads a configuration: YAML files, ``base:`` includes, dotted overrides; and writes one back.

Owns: the YAML dialect (SafeLoader; ``1e-6`` is a number; a repeated key is an error) and the order of precedence: base, then file, then
overrides from left to right.
Promises: ``load(to_yaml(config))`` equals ``config``; every error names the key and, where known, the file and line.
Does not: read environment variables or change anything on disk.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import yaml

from crl_jax.config.check import check
from crl_jax.config.parse import ConfigError, Leaf, Tree, build, merge
from crl_jax.config.schema import Config

__all__ = ["ConfigError", "load", "load_as", "parse_text", "to_yaml"]

T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads ``1e-6`` as YAML 1.2 does: a float."""


_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load(path: str | pathlib.Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The checked configuration of the file at ``path`` (None: the defaults) with ``section.key=value`` overrides applied.

    Raises ConfigError for an unreadable file, an unknown key, a wrong type, a bad override, or fields that contradict each other.
    """
    tree = {} if path is None else _read(pathlib.Path(path), ())
    return _finish(tree, overrides)


def load_as(kind: type[T], path: pathlib.Path | None = None, overrides: Sequence[str] = (), *, start: T | None = None) -> T:
    """The same for a file that describes something else: an instance of the dataclass ``kind``, whose own checks apply. What neither the
    file nor an override says is as in ``start`` (None: the defaults). Raises ConfigError."""
    tree = {} if start is None else _leaves(dataclasses.asdict(cast(Any, start)))
    if path is not None:
        tree = merge(tree, _read(path, ()))
    for override in overrides:
        tree = merge(tree, _override(override))
    return build(kind, tree)


def parse_text(text: str, overrides: Sequence[str] = (), name: str = "<text>") -> Config:
    """As ``load``, from a string; ``base:`` is resolved against the current folder."""
    return _finish(_with_base(_tree(text, name), pathlib.Path.cwd(), ()), overrides)


def to_yaml(config: Config) -> str:
    """The whole resolved configuration as YAML that loads back equal."""
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True)


def _finish(tree: Tree, overrides: Sequence[str]) -> Config:
    for override in overrides:
        tree = merge(tree, _override(override))
    config = build(Config, tree)
    problems = check(config)
    if problems:
        raise ConfigError("\n".join(str(p) for p in problems))
    return config


def _read(path: pathlib.Path, above: tuple[pathlib.Path, ...]) -> Tree:
    resolved = path.resolve()
    if resolved in above:
        raise ConfigError(f"{path}: `base` leads back to a file that includes it: {' -> '.join(p.name for p in (*above, resolved))}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text: give a YAML file") from error
    return _with_base(_tree(text, str(path)), path.parent, (*above, resolved))


def _with_base(tree: Tree, folder: pathlib.Path, above: tuple[pathlib.Path, ...]) -> Tree:
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not (isinstance(base, Leaf) and isinstance(base.value, str)):
        raise ConfigError(
            f"`base` expects the name of a YAML file beside this one, got {base.value if isinstance(base, Leaf) else 'a section'!r}"
        )
    return merge(_read(folder / base.value, above), tree)


def _tree(text: str, name: str) -> Tree:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(f"{name}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {getattr(error, 'problem', error)}") from error
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}: expected sections such as `run:` at the top")
    return _mapping(loader, node, name)


def _mapping(loader: _Loader, node: yaml.MappingNode, name: str) -> Tree:
    tree: Tree = {}
    for key_node, value_node in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
        place = f"{name}:{key_node.start_mark.line + 1}"
        key = cast(str, key_node.value)
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{place}: a key must be a plain word")
        if key in tree:
            raise ConfigError(f"{place}: `{key}` is repeated")
        if isinstance(value_node, yaml.MappingNode):
            tree[key] = _mapping(loader, value_node, name)
        else:
            tree[key] = Leaf(_construct(loader, value_node, place), place)
    return tree


def _construct(loader: _Loader, node: yaml.Node, place: str) -> Any:
    try:
        return cast(Any, loader.construct_object(node, deep=True))  # pyright: ignore[reportUnknownMemberType]
    except yaml.YAMLError as error:
        raise ConfigError(f"{place}: only plain values are allowed here: {getattr(error, 'problem', error)}") from error


def _override(text: str) -> Tree:
    dotted, equals, value = text.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {text!r}: write section.key=value, e.g. run.steps=20")
    place = f"override {text!r}"
    try:
        loaded: Any = yaml.load(value, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{place}: not a YAML value") from error
    if isinstance(loaded, dict):
        raise ConfigError(f"{place}: set one key at a time")
    node: Any = Leaf("" if loaded is None and value.strip() == "" else loaded, place)
    for key in reversed(keys):
        node = {key: node}
    return node


def _leaves(values: dict[str, Any]) -> Tree:
    return {k: _leaves(cast("dict[str, Any]", v)) if isinstance(v, dict) else Leaf(v, "start") for k, v in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in cast("dict[str, Any]", value).items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in cast("list[Any]", value)]
    return value
