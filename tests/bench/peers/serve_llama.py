"""llama.cpp on the serving workload (single turn, eight turns, SmolLM2-135M), by its batch interface in llama-cpp-python.

Usage:  PEER_OUT=l.json python serve_llama.py single|multiturn|smollm2 [--reps 5] [--model FILE.gguf --prompts FILE]

Used as well as its interface allows: every row is a sequence of its own and all are decoded together; a prompt that several rows share is
read once and its cache copied; a conversation keeps its cache from turn to turn. Keys and values are float32. Sampling and log-probs are
done on its logits in numpy, for all rows at once. One thread.
"""

from __future__ import annotations

import ctypes
import importlib.metadata as md
import pathlib
import tempfile

import gguf_files
import llama_cpp as lc
import numpy as np
import peer_common as pc
import serve_workload as sl

F32 = 0  # GGML_TYPE_F32
ALL = -1  # every position
CHUNK = 512  # most tokens of one call; no row here is longer


class Model:
    """A file and, for some number of sequences and a length, a context."""

    def __init__(self, path: pathlib.Path) -> None:
        params = lc.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = lc.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, f"{path} cannot be loaded"
        self.vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self._model))

    def context(self, sequences: int, length: int) -> Context:
        params = lc.llama_context_default_params()
        params.n_seq_max, params.n_ctx = sequences, sequences * length
        params.n_batch = params.n_ubatch = CHUNK
        params.n_threads = params.n_threads_batch = sl.one_thread()
        params.type_k = params.type_v = F32
        params.no_perf = True
        found = lc.llama_init_from_model(self._model, params)
        assert found, "no context"
        return Context(found, self.vocab)


class Context:
    """Sequences with a cache each. ``past[s]`` is how many ids of sequence ``s`` are in it."""

    def __init__(self, handle, vocab: int) -> None:
        self._handle, self._vocab = handle, vocab
        self._memory = lc.llama_get_memory(handle)
        self._batch = lc.llama_batch_init(CHUNK, 0, 1)
        self.past: dict[int, int] = {}

    def free(self) -> None:
        lc.llama_batch_free(self._batch)
        lc.llama_free(self._handle)

    def clear(self) -> None:
        lc.llama_memory_clear(self._memory, False)
        self.past.clear()

    def copy(self, source: int, target: int) -> None:
        lc.llama_memory_seq_cp(self._memory, source, target, ALL, ALL)
        self.past[target] = self.past[source]

    def read(self, rows: dict[int, sl.Ids]) -> np.ndarray:
        """Appends to sequences; returns the logits [len(rows), V] after the last id of each."""
        names, at_once = list(rows), CHUNK // max(map(len, rows.values()))  # whole rows: pieces of equal length are computed together
        found = []
        for at in range(0, len(names), at_once):
            part = names[at : at + at_once]
            tokens = [(s, i, p == len(rows[s]) - 1) for s in part for p, i in enumerate(rows[s])]
            batch = self._batch
            batch.n_tokens = len(tokens)
            for k, (sequence, token, last) in enumerate(tokens):
                position = self.past.get(sequence, 0)
                self.past[sequence] = position + 1
                batch.token[k], batch.pos[k], batch.n_seq_id[k], batch.logits[k] = token, position, 1, int(last)
                batch.seq_id[k][0] = sequence
            status = lc.llama_decode(self._handle, batch)
            assert status == 0, f"llama_decode: {status}"
            logits = ctypes.cast(lc.llama_get_logits(self._handle), ctypes.POINTER(ctypes.c_float))
            found.append(np.ctypeslib.as_array(logits, (len(part), self._vocab)).copy())
        return np.concatenate(found)

    def sample(self, logits: np.ndarray, new: int, rng: np.random.Generator | None) -> sl.Sampled:
        """``new`` ids for sequences 0, 1, ..., from ``logits`` on; greedy and without log-probs when there is no ``rng``.

        The last id of each sequence is not in its cache afterwards.
        """
        ids, logps = [], []
        for step in range(new):
            if step:
                logits = self.read({s: [int(i)] for s, i in enumerate(ids[-1])})
            if rng is None:
                ids.append(logits.argmax(-1))
                continue
            shifted = logits - logits.max(-1, keepdims=True)
            logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
            ids.append((logp + rng.gumbel(size=logp.shape).astype(np.float32)).argmax(-1))
            logps.append(np.take_along_axis(logp, ids[-1][:, None], -1)[:, 0])
        return np.stack(ids, 1).tolist(), np.stack(logps, 1).tolist() if logps else []


def rollout(context: Context, rows: list[sl.Ids], new: int, rng: np.random.Generator | None) -> sl.Sampled:
    """A completion for each row; equal rows are read once."""
    context.clear()
    first: dict[tuple[int, ...], int] = {}
    for s, row in enumerate(rows):
        first.setdefault(tuple(row), s)
    sources = [first[tuple(row)] for row in rows]
    logits = dict(zip(first.values(), context.read({s: rows[s] for s in first.values()}), strict=True))
    for s, source in enumerate(sources):
        if s != source:
            context.copy(source, s)
    return context.sample(np.stack([logits[source] for source in sources]), new, rng)


def talk(context: Context, w: pc.Workload, seed: int) -> list[list[sl.Ids]]:
    context.clear()
    rng, said, unread = np.random.default_rng(seed), [], [[] for _ in range(w.batch)]
    for turn in range(sl.TURNS):
        new = sl.history(unread, sl.context(w, seed, turn))
        said.append(context.sample(context.read(dict(enumerate(new))), sl.NEW, rng)[0])
        unread = [row[-1:] for row in said[-1]]
    return said


def main() -> None:
    args = sl.arguments(__doc__)
    w, sw = pc.workload_from_env(), pc.Stopwatch()
    lc.llama_backend_init()
    extra = {"system": lc.llama_print_system_info().decode()}
    if args.case == "smollm2":
        model, contexts = Model(args.model), []

        def make(batch: int) -> sl.Generate:
            if contexts:
                contexts.pop().free()
            contexts.append(context := model.context(batch, sl.SMOLLM2_PROMPT + sl.LONG))
            return lambda rows, new, _: rollout(context, rows, new, None)

        phases, found = sl.smollm2_batches(sw, args, make)
        extra |= found
    else:
        with tempfile.TemporaryDirectory() as folder:
            gguf_files.random_llama(w, pathlib.Path(folder) / "tiny.gguf")
            model = Model(pathlib.Path(folder) / "tiny.gguf")
            if args.case == "single":
                context = model.context(w.batch, w.prompt_len + sl.LONG)
                phases = sl.single(sw, w, lambda rows, new, seed: rollout(context, rows, new, np.random.default_rng(seed)), args.reps)
            else:
                context = model.context(w.batch, sl.EPISODE)
                phases = sl.episodes(sw, w, {"episode": lambda seed: talk(context, w, seed)}, args, compiles=False)
    versions = {"llama-cpp-python": md.version("llama_cpp_python"), "numpy": md.version("numpy")}
    sl.report("llama.cpp", versions, w, sw, phases, extra)


if __name__ == "__main__":
    main()
