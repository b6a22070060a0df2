"""Prompt texts in JSON files: one object whose fields are those of a dataclass of texts.

Owns: reading such a file. Promises: whatever is wrong with it is a ValueError that names the file and the field. Does not: know any
prompt.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, TypeVar, cast

Texts = TypeVar("Texts")


def load_texts(kind: type[Texts], path: pathlib.Path) -> Texts:
    """The texts of ``path`` as the dataclass ``kind``. Raises ValueError naming missing or unknown fields or what is no text."""
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON in UTF-8: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must hold one object of texts, not {type(content).__name__}")
    found = cast(dict[str, str], content)
    wrong = sorted(name for name, text in cast(dict[str, object], content).items() if not isinstance(text, str))
    if wrong:
        raise ValueError(f"{path.name}: {wrong} must be texts")
    fields = dataclasses.fields(cast(Any, kind))
    known = {field.name for field in fields}
    unknown = sorted(set(found) - known)
    missing = sorted({field.name for field in fields if field.default is dataclasses.MISSING} - set(found))
    if unknown or missing:
        raise ValueError(f"{path.name}: unknown fields {unknown}, missing fields {missing}; the fields are {sorted(known)}")
    return kind(**found)
