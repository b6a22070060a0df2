"""Run by test_jetstream_engine in a process of its own: JetStream's Driver and LLMOrchestrator over our engine.

Arguments: prompts as a JSON list, tokens per prompt, and the file that gets the texts as a JSON list (JetStream logs to stdout).
JetStream's Driver kills its process on any error in its threads and sets the root logger to DEBUG, which is why it never runs inside a
trainer.
"""

import asyncio
import json
import os
import pathlib
import sys

import jax
import numpy as np

if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree.map  # removed from JAX; JetStream 0.2.2 still calls it

from crl_jax.models import transformer
from crl_jax.serving.jetstream_engine import JetStreamEngine
from crl_jax.serving.jetstream_import import import_jetstream

CONFIG = transformer.ModelConfig("tiny", 40, 16, 2, 4, 2, 8, 32, tie_embeddings=False)
LENGTH, FIRST = 32, 60  # token id i is the character FIRST + i


class CharTokenizer:
    """The part of JetStream's tokenizer interface that its Driver uses."""

    pad_id, bos_id, eos_id = 0, 1, 2
    stop_tokens = frozenset({0, 2})

    def encode(self, text, *, is_bos, max_prefill_length, jax_padding):
        ids = ([self.bos_id] if is_bos else []) + [ord(c) - FIRST for c in text]
        padded = np.zeros(max_prefill_length, np.int32)
        padded[: len(ids)] = ids
        return padded, len(ids)

    def decode(self, ids):
        return "".join(chr(FIRST + i) for i in ids)


def weights():
    params = transformer.init(CONFIG, jax.random.key(0))
    params["head"]["kernel"] = params["head"]["kernel"] * 60
    return params


async def decode(orchestrator, pb2, text: str, max_tokens: int) -> str:
    request = pb2.DecodeRequest(text_content=pb2.DecodeRequest.TextContent(text=text), max_tokens=max_tokens)
    return "".join([part.stream_content.samples[0].text async for part in orchestrator.Decode(request)])


async def main(prompts: list[str], max_tokens: int) -> list[str]:
    orchestrator = import_jetstream("jetstream.core.orchestrator")
    pb2 = import_jetstream("jetstream.core.proto.jetstream_pb2")
    engine = JetStreamEngine(
        CONFIG, max_slots=8, max_length=LENGTH, row_buckets=(2,), chunk_buckets=(4, 16), max_steps=4, tokenizer=CharTokenizer()
    )
    params = engine.load_params(weights())
    driver = orchestrator.Driver(
        prefill_engines=[engine], generate_engines=[engine], prefill_params=[params], generate_params=[params], interleaved_mode=True
    )
    service = orchestrator.LLMOrchestrator(driver)
    return await asyncio.wait_for(asyncio.gather(*(decode(service, pb2, p, max_tokens) for p in prompts)), 240)


if __name__ == "__main__":
    texts = asyncio.run(main(json.loads(sys.argv[1]), int(sys.argv[2])))
    pathlib.Path(sys.argv[3]).write_text(json.dumps(texts))
    os._exit(0)  # the Driver's detokenizing thread is not a daemon
