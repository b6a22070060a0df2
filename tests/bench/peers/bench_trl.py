"""TRL GRPOTrainer on torch-CPU with the shared workload: rollout, update and whole-step times.

Usage:  PEER_OUT=trl.json python bench_trl.py [--steps 6] [--beta 0.0] [--loss dapo]
"""

from __future__ import annotations

import argparse
import importlib.metadata as md
import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import datasets
import peer_common as pc
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def make_tokenizer(w: pc.Workload) -> PreTrainedTokenizerFast:
    vocab = {f"w{i}": i for i in range(w.vocab_size)}
    vocab["<eos>"] = w.vocab_size  # outside the model's vocabulary: it can never be sampled
    tok = Tokenizer(models.WordLevel(vocab, unk_token="w3"))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="w0", eos_token="<eos>", padding_side="left")


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--beta", type=float, default=0.0)
    p.add_argument("--loss", default="dapo")
    p.add_argument("--attn", default="sdpa")
    args = p.parse_args()
    w = pc.workload_from_env()
    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))

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
        attn_implementation=args.attn,
    )
    weights = tempfile.mkdtemp()  # GRPOTrainer re-loads its reference model from the config's path when beta > 0
    LlamaForCausalLM(cfg).to(torch.float32).save_pretrained(weights)
    model = LlamaForCausalLM.from_pretrained(weights, dtype=torch.float32, attn_implementation=args.attn)
    n_params = sum(x.numel() for x in model.parameters())
    tokenizer = make_tokenizer(w)
    rows = [{"prompt": pc.prompt_words(w, i)} for i in range(w.num_prompts * (args.steps + 2))]

    def reward(completions, **_):
        return [float(sum(map(ord, c)) % 7) / 7.0 for c in completions]

    fields = set(GRPOConfig.__dataclass_fields__)
    kwargs = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "per_device_train_batch_size": w.batch,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_generations": w.num_generations,
        "num_iterations": 1,
        "beta": args.beta,
        "loss_type": args.loss,
        "max_prompt_length": w.prompt_len,
        "max_completion_length": w.completion_len,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "learning_rate": w.learning_rate,
        "lr_scheduler_type": "constant",
        "max_steps": args.steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "seed": 0,
        "shuffle_dataset": False,
        "model_init_kwargs": None,
    }
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows),
        args=GRPOConfig(**{k: v for k, v in kwargs.items() if k in fields}),
    )

    sw = pc.Stopwatch()
    lengths: list[int] = []

    def wrap(obj, attr, phase, note=None):
        fn = getattr(obj, attr)

        def inner(*a, **k):
            with sw.time(phase):
                out = fn(*a, **k)
            if note:
                note(out)
            return out

        setattr(obj, attr, inner)

    def note_length(o):
        lengths.append(int(getattr(o, "shape", o.sequences.shape if hasattr(o, "sequences") else (0, 0))[1]))

    # model.generate is the sampler itself; _generate_and_score also tokenises, scores and builds advantages.
    wrap(
        trainer.model,
        "generate",
        "rollout_generate",
        note_length,
    )
    wrap(trainer, "_generate_and_score_completions", "rollout_total")
    wrap(trainer, "compute_loss", "forward_loss")
    step_fn = trainer.training_step

    def step(*a, **k):
        sw.mark_box()
        with sw.time("training_step"):
            return step_fn(*a, **k)

    trainer.training_step = step
    opt_hooked = {"done": False}
    orig_create = trainer.create_optimizer

    def create_optimizer(*a, **k):
        out = orig_create(*a, **k)
        if not opt_hooked["done"]:
            wrap(trainer.optimizer, "step", "optimizer_step")
            opt_hooked["done"] = True
        return out

    trainer.create_optimizer = create_optimizer
    trainer.train()

    # update = forward + backward + optimizer = whole step minus rollout
    for kind in ("wall", "cpu"):
        d = getattr(sw, kind)
        opt = d["optimizer_step"]  # a KeyError here means the hook no longer fires: the update would be under-counted
        assert len(opt) == len(d["training_step"]) == len(d["rollout_total"]), {k: len(v) for k, v in d.items()}
        d["step_total"] = [s + o for s, o in zip(d["training_step"], opt, strict=True)]
        d["update"] = [s - r for s, r in zip(d["step_total"], d["rollout_total"], strict=True)]
    phases = {
        "rollout_generate": w.completion_tokens,
        "rollout_total": w.completion_tokens,
        "update": w.total_tokens,
        "step_total": w.completion_tokens,
    }
    versions = {k: md.version(k) for k in ("trl", "transformers", "torch", "accelerate", "datasets", "numpy")}
    logs = [h for h in trainer.state.log_history if "loss" in h]
    pc.report(
        f"trl-GRPOTrainer beta={args.beta} loss={args.loss} attn={args.attn}",
        versions,
        w,
        sw,
        phases,
        {
            "params": n_params,
            "torch_threads": torch.get_num_threads(),
            "sequence_lengths": lengths,
            "weight_std": round(float(model.model.layers[0].mlp.up_proj.weight.std()), 4),
            "completion_mean_len": [h.get("completions/mean_length") for h in logs],
        },
    )


if __name__ == "__main__":
    main()
