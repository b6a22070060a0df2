"""Repair tasks in SWE-bench's schema.

Owns: the record and reading it from JSON lines.
Promises: a record that cannot be graded is refused when it is read, with its line and field.
Does not: know where the repository is.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ID = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9._+-]{0,150}\Z")
_TEXTS = ("repo", "instance_id", "base_commit", "patch", "test_patch", "problem_statement")
_MAY_BE_MISSING = ("hints_text", "created_at", "version", "environment_setup_commit")
_FILE = re.compile(r"^\+\+\+ b/(.+?)\t?$|^--- a/(.+?)\t?$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Instance:
    """One task. Tests are pytest ids ("tests/test_x.py::test_y"). ``patch`` (the accepted repair) and ``test_patch`` are for the grader."""

    repo: str
    instance_id: str
    base_commit: str
    patch: str
    test_patch: str
    problem_statement: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    hints_text: str = ""
    created_at: str = ""
    version: str = ""
    environment_setup_commit: str = ""

    @property
    def summary(self) -> str:
        """The first line of the issue that says something."""
        lines = (line.strip().lstrip("#").strip() for line in self.problem_statement.splitlines())
        return next((line for line in lines if line), self.instance_id)

    @property
    def test_files(self) -> tuple[str, ...]:
        """Files of the listed tests and of the test patch, relative to the repository."""
        listed = [test.partition("::")[0] for test in (*self.fail_to_pass, *self.pass_to_pass)]
        patched = [new or old for new, old in _FILE.findall(self.test_patch)]
        return tuple(sorted({file for file in (*listed, *patched) if file and ".." not in file.split("/") and not file.startswith("/")}))

    def record(self) -> dict[str, Any]:
        """As SWE-bench writes it."""
        fields = dataclasses.asdict(self)
        lists = {"FAIL_TO_PASS": json.dumps(fields.pop("fail_to_pass")), "PASS_TO_PASS": json.dumps(fields.pop("pass_to_pass"))}
        return {**fields, **lists}


def read_instances(path: Path) -> tuple[Instance, ...]:
    """The instances of a JSON-lines file. Raises ValueError that names line and field, OSError."""
    found: dict[str, Instance] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as broken:
        raise ValueError(f"{path.name}: no text in UTF-8 ({broken.reason} at byte {broken.start})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as broken:
            raise ValueError(f"{where}: not JSON ({broken})") from None
        instance = read_instance(record, where)
        if instance.instance_id in found:
            raise ValueError(f"{where}: instance_id {instance.instance_id!r} is there twice")
        found[instance.instance_id] = instance
    if not found:
        raise ValueError(f"{path}: no instance in the file; expected one JSON object a line, in SWE-bench's schema")
    return tuple(found.values())


def read_instance(record: Any, where: str) -> Instance:
    """One record. Raises ValueError that begins with ``where`` and names the field."""
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}: expected a JSON object, found {type(record).__name__}")
    texts: dict[str, str] = {}
    for field in (*_TEXTS, *_MAY_BE_MISSING):
        value = record.get(field)
        if value is None and field in _MAY_BE_MISSING:
            value = ""
        if not isinstance(value, str):
            raise ValueError(f"{where}, field {field}: expected text, found {'nothing' if value is None else type(value).__name__}")
        if not _is_text(value):
            raise ValueError(f"{where}, field {field}: half a surrogate pair or a NUL, which no file and no model can hold")
        texts[field] = value
    if not _ID.match(texts["instance_id"]):
        raise ValueError(f"{where}, field instance_id: {texts['instance_id']!r} cannot be a file name: use letters, digits and . _ + -")
    fail, keep = _tests(record, "FAIL_TO_PASS", where), _tests(record, "PASS_TO_PASS", where)
    if not fail:
        raise ValueError(f"{where}, field FAIL_TO_PASS: no test, so nothing could show the repair")
    return Instance(fail_to_pass=fail, pass_to_pass=keep, **texts)


def _tests(record: Mapping[str, Any], field: str, where: str) -> tuple[str, ...]:
    value = record.get(field)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"{where}, field {field}: expected a list, or a JSON list as text") from None
    if not isinstance(value, list) or not all(isinstance(test, str) and _is_text(test) for test in value):
        raise ValueError(f"{where}, field {field}: expected a list of test ids")
    return tuple(value)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value
