"""A two-layer model with random weights and a byte-level tokenizer: no download, decodes in a few milliseconds.

Its weights are large enough for attention to matter: `load_format="dummy"` would make each token a function
of the one before it, and no wrong byte of KV would ever be seen.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 1024
"""256 bytes, two special tokens, and frequent pairs of letters."""
END = 1

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": END,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path) -> Path:
    """Write config, tokenizer and weights, the same every time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, "bos_token_id": 0}))
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "model_max_length": 2048,
                "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: ",
            }
        )
    )
    return folder


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]

    def matrix(rows: int, columns: int, gain: float) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, width, 8.0),
        "model.norm.weight": np.ones(width, np.float32),
        "lm_head.weight": matrix(VOCABULARY, width, 3.0),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, gain in (("q_proj", 2.0), ("k_proj", 2.0), ("v_proj", 3.0), ("o_proj", 3.0)):
            weights[f"{at}.self_attn.{name}.weight"] = matrix(width, width, gain)
        weights[f"{at}.mlp.gate_proj.weight"] = matrix(inner, width, 1.5)
        weights[f"{at}.mlp.up_proj.weight"] = matrix(inner, width, 1.5)
        weights[f"{at}.mlp.down_proj.weight"] = matrix(width, inner, 1.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}.{name}.weight"] = np.ones(width, np.float32)
    return weights


def _tokenizer() -> Tokenizer:
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    letters = "etaoinshrdlu"
    merges = [(one, two) for one in letters for two in letters]
    for one, two in merges:
        vocabulary[one + two] = len(vocabulary)
    while len(vocabulary) < VOCABULARY:
        vocabulary[f"<unused {len(vocabulary)}>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer
