"""What the programs need for SmolLM2-135M: prompts as ids, and the weights as a Hugging Face folder in float32.

Usage:  python smollm2_files.py FOLDER README.md        (writes FOLDER/prompts.json, FOLDER/hf and FOLDER/source, the path of the GGUF file)

The prompts are consecutive pieces of a text, so that greedy continuations mean something.
"""

from __future__ import annotations

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE)]

import serve_workload as sl  # noqa: E402

from crl_jax.models.hf_weights import export_hf  # noqa: E402
from crl_jax.models.load import load_params  # noqa: E402
from crl_jax.models.packages import package_file  # noqa: E402
from crl_jax.models.presets import preset  # noqa: E402
from crl_jax.models.smollm2 import FILE, INSTALL, load_smollm2_tokenizer  # noqa: E402


def main() -> None:
    folder, text = map(pathlib.Path, sys.argv[1:3])
    folder.mkdir(parents=True, exist_ok=True)
    ids = load_smollm2_tokenizer().encode(text.read_text(encoding="utf-8"))
    rows = [ids[i * sl.SMOLLM2_PROMPT : (i + 1) * sl.SMOLLM2_PROMPT] for i in range(sl.SMOLLM2_ROWS)]
    if len(rows[-1]) < sl.SMOLLM2_PROMPT:
        raise SystemExit(f"{text} has {len(ids)} tokens, too few for {len(rows)} prompts of {sl.SMOLLM2_PROMPT}")
    (folder / "prompts.json").write_text(json.dumps(rows))
    (folder / "source").write_text(str(package_file(*FILE, install=INSTALL)))
    if not (folder / "hf").exists():
        config = preset("smollm2-135m")
        export_hf(config, load_params("builtin:smollm2-135m", config, seed=0), folder / "hf", dtype="float32")


if __name__ == "__main__":
    main()
