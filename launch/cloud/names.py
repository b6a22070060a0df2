"""Which names are accepted.

Owns: one rule per kind of name. Promises: what passes holds no space, quote or sign that a shell, gcloud's list syntax or YAML would read
as anything but a name; a refusal says the rule. Does not: know whether the thing exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from launch.cloud.errors import Refused

_RULES: dict[str, tuple[str, str]] = {
    "name": (r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", "1 to 40 lower-case letters, digits and hyphens, a letter first, no hyphen last"),
    "zone": (r"[a-z]+-[a-z]+[0-9]+-[a-z]", "a zone such as us-central2-b"),
    "project": (r"[a-z]([-a-z0-9.:]{4,61})[a-z0-9]", "a project id: lower-case letters, digits and hyphens"),
    "accelerator type": (r"[a-z]+[0-9]+[a-z]*-[0-9]{1,5}", "a type such as v5litepod-16, v5p-128 or v6e-8"),
    "runtime version": (r"[a-z0-9][-a-z0-9.]{0,62}", "lower-case letters, digits, dots and hyphens, e.g. v2-alpha-tpuv6e"),
    "label": (r"[a-z][-a-z0-9_]{0,62}=[-a-z0-9_]{0,63}", "key=value of lower-case letters, digits, hyphens and underscores"),
    "reservation": (
        r"(projects/[-a-z0-9.:]+/reservations/)?[a-z][-a-z0-9]{0,62}",
        "NAME or projects/P/reservations/NAME",
    ),
    "service account": (r"[-a-z0-9]+@[-a-z0-9.]+", "an address such as trainer@my-project.iam.gserviceaccount.com"),
    "object name": (r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "1 to 63 lower-case letters, digits and hyphens, no hyphen first or last"),
    "network": (r"[a-z][-a-z0-9]{0,62}", "lower-case letters, digits and hyphens"),
    "bucket": (r"gs://[a-z0-9][-a-z0-9._]{1,61}[a-z0-9](/[A-Za-z0-9_][-A-Za-z0-9._]*)*", "gs://BUCKET or gs://BUCKET/FOLDER"),
    "image": (r"[a-z0-9][-a-z0-9._/]*(:[0-9]+/[-a-z0-9._/]+)?(:[A-Za-z0-9_][-A-Za-z0-9._]*)?(@sha256:[0-9a-f]{64})?", "HOST/PATH:TAG"),
    "topology": (r"[0-9]{1,3}x[0-9]{1,3}(x[0-9]{1,3})?", "a shape such as 4x4 or 2x2x4"),
    "size": (r"[1-9][0-9]{0,5}(Gi|Ti)", "a size such as 100Gi"),
    "context": (r"[A-Za-z0-9_][-A-Za-z0-9_.:@/]{0,252}", "letters, digits and _ - . : @ /"),
    "recipe": (
        r"(?!.*(^|/)\.\.(/|$))[A-Za-z0-9_][-A-Za-z0-9_./]*\.ya?ml",
        "a YAML file of the project, relative to its folder, e.g. configs/quickstart.yaml",
    ),
    "setting": (r"[A-Za-z_][A-Za-z0-9_.]*=[^\x00-\x1f\x7f]*", "section.key=value on one line"),
    "folder": (
        r"(?!.*(^|/)\.\.(/|$))[A-Za-z0-9_/][-A-Za-z0-9_./]*",
        "a path of letters, digits and . - _ without ..",
    ),
}


def checked(kind: str, value: str) -> str:
    """``value`` when the rule of ``kind`` accepts it. Raises Refused, which names the value and the rule."""
    pattern, rule = _RULES[kind]
    if not re.fullmatch(pattern, value):
        raise Refused(f"{kind} {value!r} is not accepted: {rule}")
    return value


def all_checked(kind: str, values: Iterable[str]) -> tuple[str, ...]:
    """Every one of ``values``, checked."""
    return tuple(checked(kind, value) for value in values)
