"""``transformers`` generate on torch-CPU on the serving workload (single turn, eight turns, SmolLM2-135M).

Usage:  PEER_OUT=t.json python serve_transformers.py single|multiturn|smollm2 [--reps 5] [--model FOLDER --prompts FILE]

Two ways of the eight turns are timed: ``episode`` reads the whole history again in every turn, as trainers built on it do;
``episode_reuse`` hands the cache of the turn before to the next call, which works for a batch whose conversations all have the same length,
as they do here. A compiled forward pass with a static cache takes as long as the plain one on a CPU (measured), so the plain one it is.
The log-probs of sampled tokens are taken from the returned logits; SmolLM2 is greedy and asks for none.
"""

from __future__ import annotations

import importlib.metadata as md
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import peer_common as pc
import serve_workload as sl
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


def tiny(w: pc.Workload) -> LlamaForCausalLM:
    cfg = LlamaConfig(
        vocab_size=w.vocab_size,
        hidden_size=w.embed_dim,
        intermediate_size=w.hidden_dim,
        num_hidden_layers=w.num_layers,
        num_attention_heads=w.num_heads,
        num_key_value_heads=w.num_kv_heads,
        head_dim=w.head_dim,
        rms_norm_eps=w.norm_eps,
        rope_theta=float(w.rope_theta),
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(cfg).to(torch.float32).eval()


def ask(model, rows: list[sl.Ids], new: int, *, sample: bool = True, cache=None) -> sl.Sampled:
    ids = torch.tensor(rows)
    how = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=None,
        do_sample=sample,
        eos_token_id=None,  # nothing stops early
        pad_token_id=0,
        output_logits=sample,
        return_dict_in_generate=True,
        **({} if cache is None else {"cache": cache}),
        **how,
    )
    sampled = out.sequences[:, ids.shape[1] :]
    if not sample:
        return sampled.tolist(), []
    picked = [
        torch.log_softmax(step.float(), -1).gather(1, token[:, None])[:, 0] for step, token in zip(out.logits, sampled.T, strict=True)
    ]
    return sampled.tolist(), torch.stack(picked, 1).tolist()


def talk(model, w: pc.Workload, seed: int, reuse: bool) -> list[list[sl.Ids]]:
    torch.manual_seed(seed)
    said, past, cache = [], [[] for _ in range(w.batch)], DynamicCache(config=model.config) if reuse else None
    for turn in range(sl.TURNS):
        past = sl.history(past, sl.context(w, seed, turn))
        said.append(ask(model, past, sl.NEW, cache=cache)[0])
        past = sl.history(past, said[-1])
        if cache is not None:
            assert cache.get_seq_length() == len(past[0]) - 1, "the cache of the turn was not kept"
    return said


def main() -> None:
    args = sl.arguments(__doc__)
    w = pc.workload_from_env()
    torch.manual_seed(0)
    torch.set_num_threads(sl.one_thread())
    sw, extra = pc.Stopwatch(), {"torch_threads": torch.get_num_threads()}
    if args.case == "smollm2":
        model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
        phases, found = sl.smollm2_batches(sw, args, lambda _: lambda rows, new, _seed: ask(model, rows, new, sample=False))
        extra |= found
    else:
        model = tiny(w)
        if args.case == "single":
            phases = sl.single(sw, w, lambda rows, new, _: ask(model, rows, new), args.reps)
        else:
            ways = {"episode": lambda seed: talk(model, w, seed, False), "episode_reuse": lambda seed: talk(model, w, seed, True)}
            phases = sl.episodes(sw, w, ways, args, compiles=False)
    versions = {k: md.version(k) for k in ("transformers", "torch", "numpy")}
    sl.report("transformers generate", versions, w, sw, phases, extra)


if __name__ == "__main__":
    main()
