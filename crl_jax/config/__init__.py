"""Configuration: one frozen, typed value for a whole run, read from YAML once and trusted afterwards.

Owns: the schema (``schema``, ``roles``), reading (``load``) and cross-field checks (``check``).
Promises: importing it starts no JAX and reads no file; a value that exists has the declared types and passed ``check``.
Does not: build anything from the values; every part below the learner takes plain arguments.
"""

from crl_jax.config.check import ConfigProblem, check
from crl_jax.config.load import ConfigError, load, to_yaml
from crl_jax.config.roles import (
    ActorConfig,
    ActorLossConfig,
    ExtractorConfig,
    ExtractorLossConfig,
    LoraConfig,
    MeshConfig,
    OptimizerConfig,
    RoleConfig,
    SamplingConfig,
    ServerConfig,
)
from crl_jax.config.schema import AskConfig, BankConfig, Config, EnvConfig, RunConfig, TelemetryConfig

__all__ = [
    "ActorConfig",
    "ActorLossConfig",
    "AskConfig",
    "BankConfig",
    "Config",
    "ConfigError",
    "ConfigProblem",
    "EnvConfig",
    "ExtractorConfig",
    "ExtractorLossConfig",
    "LoraConfig",
    "MeshConfig",
    "OptimizerConfig",
    "RoleConfig",
    "RunConfig",
    "SamplingConfig",
    "ServerConfig",
    "TelemetryConfig",
    "check",
    "load",
    "to_yaml",
]
