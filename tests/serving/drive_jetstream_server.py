"""Run by test_jetstream_server in a process of its own: our gRPC door over JetStream's Driver with the tiny model.

Arguments: one word per server, PREFILL_ENGINES,GENERATE_ENGINES,TOKEN (1,1: one engine does both). Prints their ports; ends when
stdin does.
"""

import asyncio
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).parent / "http"))
import tiny_model as tiny
from letters import LetterCodec

from crl_jax.records import SamplingParams
from crl_jax.serving import jetstream_server
from crl_jax.serving.jetstream_driver import ServedEngine, Tokens

DEFAULTS = SamplingParams(tiny.LENGTH, temperature=0.0, stop_ids=(tiny.STOP,))


def engine(seed):
    return ServedEngine(
        tiny.CONFIG,
        max_slots=4,
        max_length=tiny.LENGTH,
        row_buckets=(2,),
        chunk_buckets=(4, 16),
        max_steps=4,
        defaults=DEFAULTS,
        tokenizer=Tokens([tiny.STOP]),
        seed=seed,
    )


async def serve(prefills, generates, token):
    server, port = jetstream_server.bind("127.0.0.1", 0, token)
    first = [engine(i) for i in range(prefills)]
    second = first if (prefills, generates) == (1, 1) else [engine(10 + i) for i in range(generates)]
    service, _ = jetstream_server.make_service(first, second, tiny.weights(0), LetterCodec(), queue_limit=16)
    jetstream_server.add_service(server, service)
    await server.start()
    return server, port


async def main(words):
    servers = []
    for word in words:
        prefills, generates, token = word.split(",")
        servers.append(await serve(int(prefills), int(generates), token))
    print(*(port for _, port in servers), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for server, _ in servers:
        await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
    os._exit(0)
