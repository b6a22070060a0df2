"""Which part of a run this process has: both models or one, alone or with other processes.

Owns: the roles of a process and what a configuration must say for them. Promises: a configuration that cannot be run this way is refused
before anything starts, with the fix. Does not: start anything.

In one process both models may be trained. Several processes train one: each role is a job of its own, with devices of its own, and the bank
is a third; text and small records go between them, never weights.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from crl_jax.config.check import rows_of_step
from crl_jax.config.parse import ConfigError
from crl_jax.config.schema import Config
from crl_jax.processes import Processes

RoleName = Literal["actor", "extractor"]


@dataclasses.dataclass(frozen=True)
class Job:
    """``role`` None: all models that the method has."""

    role: RoleName | None = None
    processes: Processes = dataclasses.field(default_factory=Processes.alone)

    def roles(self, config: Config) -> tuple[str, ...]:
        """The models of this job."""
        if self.role is not None:
            return (self.role,)
        return ("actor",) if config.run.method == "baseline" else ("actor", "extractor")

    def check(self, config: Config) -> None:
        """Raises ConfigError when ``config`` cannot be run as this job."""
        count, shared = self.processes.count, bool(config.bank.server.url)
        if self.role == "extractor" and config.run.method not in ("exp_only", "complementary"):
            raise ConfigError(f"--role extractor: run.method={config.run.method} does not train it: start the actor's job alone")
        if self.role == "extractor" and config.extractor.server.url:
            raise ConfigError("`extractor.server.url`: this job serves the extractor itself: only the bank's recipe names where it is")
        if self.role is None and config.run.method in ("complementary", "exp_only") and shared and not config.extractor.server.url:
            fix = "name one `crl serve extractor` as extractor.server.url here and in the recipe of `crl bank serve`"
            why = "lessons are written where the bank is, so the extractor trained here must be served to it"
            raise ConfigError(f"`extractor.server.url`: {why}: {fix}, or train each model in a job of its own (--role)")
        if (
            self.role is None
            and "extractor" in self.roles(config)
            and (server := config.extractor.server).url
            and not server.weights_folder
        ):
            fix = "name a folder both can read, and start the server with --weights-folder on it"
            raise ConfigError(f"`extractor.server.weights_folder`: the server must get this run's weights: {fix}")
        if self.role is not None and config.run.method != "baseline" and not shared:
            raise ConfigError(
                f"--role {self.role}: the models' jobs share a bank, so start `crl bank serve` and set bank.server.url, e.g. grpc://host:8100"
            )
        if count > 1 and len(self.roles(config)) > 1:
            raise ConfigError(
                f"{count} processes train one model: start a job with --role actor and one with --role extractor, and a bank for both"
            )
        if config.run.sync and (count > 1 or self.role is not None):
            raise ConfigError("`run.sync`: a synchronous run is one process with both models: set run.sync=false, or leave out --role")
        for name in self.roles(config) if count > 1 else ():
            if rows_of_step(config, name) % count or (name == "actor" and config.run.groups_per_step % count):
                key = "run.groups_per_step" if name == "actor" else "extractor.batch_size"
                raise ConfigError(f"`{key}`: does not divide over {count} processes: use a multiple of {count}")
        if count > 1 and "actor" in self.roles(config) and config.actor.server.url:
            raise ConfigError("`actor.server.url`: several processes sample on their own devices each: leave it out, or use one process")
        if count > 1 and config.actor.gate.enabled and "actor" in self.roles(config):
            raise ConfigError("`actor.gate.enabled`: the gate's tally is kept by one process: set it to false, or use one process")
