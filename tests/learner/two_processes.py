"""One of two processes that train together: argv = process number, port, folder. Prints what it saw; run by ``test_two_processes``."""

import json
import pathlib
import sys

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
me, port, folder = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, me)

import toy_model  # noqa: E402  (JAX must know its processes first)
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from crl_jax.checkpoint.arrays import write_tree  # noqa: E402
from crl_jax.learner import objective  # noqa: E402
from crl_jax.learner.batching import part_of, to_batch  # noqa: E402
from crl_jax.learner.optimizer import make_optimizer  # noqa: E402
from crl_jax.learner.placement import place_batch, state_shardings  # noqa: E402
from crl_jax.learner.state import init_state  # noqa: E402
from crl_jax.learner.step import make_train_step  # noqa: E402
from crl_jax.sharding.mesh import make_mesh  # noqa: E402

mesh, optimizer = make_mesh(2, 1, 1), make_optimizer(0.01, eps=1e-3)
everywhere = {name: NamedSharding(mesh, PartitionSpec()) for name in toy_model.init()}
state = init_state(toy_model.init(), optimizer)
shardings = state_shardings(state, optimizer, everywhere, mesh)
state = jax.device_put(state, shardings)
step = make_train_step(None, optimizer, objective.actor(), temperature=1.0, allowed=None, mesh=mesh, shardings=shardings, model=toy_model)
seen = []
for n in range(3):
    whole = to_batch(toy_model.samples(7, n), **toy_model.BUCKETS)
    state, sums = step(state, place_batch(part_of(whole, me, 2), mesh, ("data", "fsdp")))
    seen.append(sums["loss"].mean())  # every process reads, every process saves: nothing waits for the other
    write_tree(folder / str(n), state)
uneven = ""
try:
    rows = {"row_buckets": (3,)} if me else {"row_buckets": (2,)}
    place_batch(to_batch(toy_model.samples(2), **toy_model.BUCKETS | rows), mesh, ("data", "fsdp"))
except ValueError as error:
    uneven = str(error)
print(json.dumps({"losses": seen, "uneven": uneven}), flush=True)
