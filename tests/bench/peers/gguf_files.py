"""GGUF files for llama.cpp: the weights of another file at full precision, and the random Llama of the tiny workload.

Usage:  python gguf_files.py SOURCE.gguf TARGET.gguf f32|f16        (needs the ``gguf`` package)

Tensors are dequantised and written as they stand (norms always in float32); every field of the source is kept but the file type, so the
result is the same model in another type.
"""

from __future__ import annotations

import pathlib
import sys

import gguf
import numpy as np
import peer_common as pc

DTYPES = {"f32": (np.float32, gguf.LlamaFileType.ALL_F32), "f16": (np.float16, gguf.LlamaFileType.MOSTLY_F16)}
OWN = ("general.architecture", "general.file_type", "general.quantization_version")  # written anew, or meaningless without quantisation


def convert(source: pathlib.Path, target: pathlib.Path, kind: str) -> None:
    """``source`` with all matrices as ``kind``."""
    dtype, file_type = DTYPES[kind]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in OWN:
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, dtype if values.ndim > 1 else np.float32))
    finish(writer)


def random_llama(w: pc.Workload, target: pathlib.Path) -> None:
    """Matrices N(0, 0.02), norms 1, embedding and output shared, no tokenizer."""
    writer, rng = gguf.GGUFWriter(target, "llama"), np.random.default_rng(0)
    writer.add_vocab_size(w.vocab_size)
    writer.add_context_length(4096)
    writer.add_embedding_length(w.embed_dim)
    writer.add_block_count(w.num_layers)
    writer.add_feed_forward_length(w.hidden_dim)
    writer.add_head_count(w.num_heads)
    writer.add_head_count_kv(w.num_kv_heads)
    writer.add_key_length(w.head_dim)
    writer.add_value_length(w.head_dim)
    writer.add_rope_dimension_count(w.head_dim)
    writer.add_rope_freq_base(float(w.rope_theta))
    writer.add_layer_norm_rms_eps(w.norm_eps)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    d, q, kv, f = w.embed_dim, w.num_heads * w.head_dim, w.num_kv_heads * w.head_dim, w.hidden_dim
    layer = {"attn_q": (q, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, q)}
    layer |= {"ffn_gate": (f, d), "ffn_up": (f, d), "ffn_down": (d, f), "attn_norm": (d,), "ffn_norm": (d,)}
    shapes = {"token_embd": (w.vocab_size, d), "output_norm": (d,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(w.num_layers) for name, shape in layer.items()}
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else 0.02 * rng.standard_normal(shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3])
