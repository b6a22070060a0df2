"""Makes the tokenizer folders below chat/, and the ids that `transformers` gives for conversations.

    python tests/golden/make_chat.py            # needs transformers; made with the versions in made_with.json

Each folder has tokenizer.json, tokenizer_config.json and chat_template.jinja: small vocabularies, and templates written for these tests
that do what those of a family do (a default system message, earlier reasoning removed, a date in the system message, the system message
inside the user's turn). expected.json: folder -> list of [conversation, ids that end with the generation prompt].
"""

import json
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent / "chat"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MERGES = [("s", "e"), ("se", "r"), ("u", "ser"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ċ", "Ċ"), ("n", "o"), ("o", "r"), ("<", "|")]

TEMPLATES = {
    "default_system": """{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nAnswer briefly.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "reasoning": """{%- set last = namespace(user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + ('user\\n<tool_response>' if m.role == 'tool' else m.role) + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > last.user and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
    {{- m.content.split('</think>')[-1] }}{{ '\\n</tool_response>' if m.role == 'tool' }}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}
""",
    "dated": """{{- bos_token }}
{%- if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% else %}{% set date = '26 Jul 2024' %}{% endif %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date + '\\n\\n' + system + '<|eot_id|>' }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
""",
    "folded_system": """{{ bos_token }}
{%- set first = '' %}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user, assistant') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (first if loop.first else '') }}
    {{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
""",
}
CONVERSATIONS = [
    [["user", "go 12 steps"]],
    [["system", "it is dark"], ["user", "the door's shut"]],
    [["system", "be brief"], ["user", "north?"], ["assistant", "no"], ["user", "south\nor east"], ["assistant", "east"], ["user", "done"]],
    [["user", "ask"], ["assistant", "where"], ["tool", "the answer is no"]],
]


def bytes_tokenizer():
    """Byte-level BPE with Qwen's word rules, special tokens, and markers that are added but not special."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]
    core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=MERGES))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    markers = ["<think>", "</think>", "<tool_response>", "</tool_response>"]
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in markers])
    return core, "<|begin_of_text|>"


def spaces_tokenizer():
    """BPE over characters with a visible space and bytes for the rest, like Gemma's; a run of newlines is an added token."""
    special = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
    characters = ["▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,'?!<>_\n"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("u", "s"), ("us", "er"), ("e", "r"), ("m", "o"), ("n", "o")]
    merges.sort(key=lambda m: m == ("us", "er"))
    pieces = [*special, "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *characters, *("".join(merge) for merge in merges)]
    core = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    core.add_tokens([AddedToken("\n\n", special=False, normalized=False)])
    return core, "<bos>"


def main():
    expected = {}
    for name, template in TEMPLATES.items():
        core, bos = spaces_tokenizer() if name == "folded_system" else bytes_tokenizer()
        folder = HERE / name
        folder.mkdir(parents=True, exist_ok=True)
        core.save(str(folder / "tokenizer.json"), pretty=False)
        settings = {"bos_token": bos, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
        (folder / "chat_template.jinja").write_text(template)
        oracle = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token=bos)
        expected[name] = []
        # Today's date would change with every run, and the library gives the template no clock: the oracle gets the built-in date too.
        text = template.replace("strftime_now is defined", "false")
        for conversation in CONVERSATIONS:
            if name == "folded_system" and conversation[-1][0] == "tool":
                continue
            turns = [{"role": role, "content": content} for role, content in conversation]
            ids = oracle.apply_chat_template(turns, chat_template=text, add_generation_prompt=True, tokenize=True, return_dict=False)
            expected[name].append([conversation, ids])
    (HERE / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
