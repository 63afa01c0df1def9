"""Qwen3-14B from its public configuration: the decoder stack, or with ``-p labels=true`` the
whole language model and its loss.

Written out here, so that nothing is downloaded.  offplan builds it without allocating its
weights; built for real it takes 28 GB.

Saved views of the decoder stack, 40 layers, batch 4 x 4096, bf16, under ``no-view`` and
``last-holder``: 49.66 GB and 13.42 GB skipped under ``alias``. The second is, for each layer, one
attention output that a ``view`` (for the output projection) and a ``detach`` (for attention's own
backward) hold for each other: 40 layers * 2 values * batch 4 * seq 4096 * 40 heads * head size
128 * 2 bytes = 13,421,772,800 bytes.
"""

import torch
from transformers import AutoModel, AutoModelForCausalLM, Qwen3Config


def build(layers: int = 40, batch: int = 4, seq: int = 4096, labels: bool = False):
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=layers,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        hidden_act="silu",
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        attention_bias=False,
        tie_word_embeddings=False,
        use_cache=False,
    )
    family = AutoModelForCausalLM if labels else AutoModel
    model = family.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    tokens = torch.randint(config.vocab_size, (batch, seq))
    kwargs = {"input_ids": tokens}
    if labels:
        kwargs["labels"] = tokens
    return model, (), kwargs
