"""Tiny random causal language models, one per architecture of transformers, built in plain PyTorch.

`CASES` is the table: a model type, the overrides that make its default configuration tiny, and the mechanisms it uses.
`SUITE` lists the cases that the test suite runs; `make architectures` runs all of them. `NOT_COVERED` gives the reason
why each of the other causal model types of transformers has no case. Multimodal models are in `tiny_wrappers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tiny_wrappers import WRAPPERS
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trillora.model.loading.wrapper import auto_class, multimodal_class

VOCABULARY = 256

# Mechanisms that a bridge to another framework can get wrong independently of each other.
MECHANISMS = {
    "dense": "attention and a feed-forward network in every layer",
    "tied": "the head is the embedding matrix",
    "biases": "biases on the projections",
    "fused-projections": "one weight matrix holds several projections",
    "transposed-linear": "weights stored input-first (GPT-2's Conv1D)",
    "qk-norm": "queries and keys are normalized",
    "parallel-block": "attention and feed-forward read the same input",
    "multipliers": "constants scale embeddings, attention, residuals or logits",
    "softcap": "tanh caps on attention scores or logits",
    "sliding": "attention limited to a window of recent tokens",
    "chunked": "attention limited to the token's own chunk",
    "sinks": "learned extra entries in the softmax of attention",
    "gated-attention": "the output of attention is multiplied by a gate",
    "differential": "the difference of two attention maps",
    "mla": "keys and values from a low-rank latent; value width differs from key width",
    "indexed": "a learned index chooses which keys a query sees",
    "compressed": "keys pooled over blocks of tokens",
    "shared-kv": "later layers reuse the keys and values of earlier ones",
    "mixture": "routed experts",
    "shared-expert": "an expert for every token, in addition to the routed ones",
    "hybrid": "layers of different kinds in one model",
    "mamba": "selective state space, first generation",
    "mamba2": "selective state space, second generation (chunked)",
    "gated-delta": "gated delta rule, or its per-channel variant",
    "linear-attention": "attention without softmax, with decay",
    "recurrent": "another recurrence over tokens",
    "conv": "short convolution over tokens outside a state-space block",
    "shared-weights": "one block's weights are used at several depths",
    "per-layer-inputs": "every layer receives its own embedding of the tokens",
    "hyper-connections": "several residual streams mixed at each layer",
    "rope-scaling": "rotary frequencies other than the default",
    "partial-rotary": "only a part of each head is rotated",
    "rotary-per-layer": "rotary frequencies differ between layers",
    "no-rotary": "some or all attention layers have no rotary positions",
    "learned-positions": "position embeddings added to the input, learned or sinusoidal",
    "alibi": "linear biases on attention scores",
    "position-bias": "biases on attention scores from content and distance, passed to the attention function",
    "own-attention": "attention computed in the layer's own code, not through transformers' attention interface",
}


@dataclass(frozen=True)
class Case:
    model_type: str
    overrides: dict[str, Any]
    mechanisms: tuple[str, ...]


def _case(model_type: str, mechanisms: str, *fragments: Mapping[str, Any], **overrides: Any) -> Case:
    merged: dict[str, Any] = {}
    for fragment in fragments:
        merged |= fragment
    return Case(model_type, merged | overrides, tuple(mechanisms.split()))


# Applied to every case first. A value of None in a case removes the key.
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 16}
# Layers with full attention have wider heads.
GEMMA4_HEADS = {"head_dim": 16, "global_head_dim": 32}
ALL_HEADS = {"num_key_value_heads": 4}
WINDOW = {"sliding_window": 8}
GPT = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128}
# Two repetitions of two kinds of layers: enough to find the period and to share a scan body.
SLIDING_FULL = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
SLIDING_SLIDING_FULL = {
    **WINDOW,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
LINEAR_FULL = {"layer_types": ["linear_attention", "full_attention"] * 2}
CONV_FULL = {"layer_types": ["conv", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
DENSE_FIRST = {"first_k_dense_replace": 1}
SPARSE_AFTER_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
LATENT = {
    **ALL_HEADS,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
# Fewer keys than the 24 tokens of a test sequence, so that the selection matters. With few heads, many scores would be
# exactly zero, and which of several equal keys is selected depends on the library.
INDEX = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
KIMI_DELTA = {"linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
NEMOTRON_MAMBA2 = {
    **HEAD,
    "num_hidden_layers": None,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "chunk_size": 8,
}
SCALES = {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0}
ALTUP = {"laurel_rank": 8, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY}


def _rotary(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


# Formatted by hand: one line or paragraph per case reads like a table.
# fmt: off
CASES: dict[str, Case] = {
    # Dense decoders.
    "apertus": _case("apertus", "dense qk-norm rope-scaling"),
    "arcee": _case("arcee", "dense", HEAD),
    "bitnet": _case("bitnet", "dense"),
    "cwm": _case("cwm", "dense sliding rope-scaling", HEAD, SLIDING_FULL),
    "diffllama": _case("diffllama", "dense differential", HEAD),
    "doge": _case("doge", "dense qk-norm indexed", HEAD, keep_window_size=8),
    "emu3": _case("emu3", "dense", text_config=BASE),
    "ernie4_5": _case("ernie4_5", "dense tied", HEAD),
    "exaone4": _case("exaone4", "dense sliding qk-norm no-rotary", WINDOW, sliding_window_pattern=2),
    "gemma": _case("gemma", "dense tied multipliers", HEAD),
    "gemma2": _case("gemma2", "dense tied sliding softcap multipliers", HEAD, WINDOW),
    "gemma3_text": _case("gemma3_text", "dense tied sliding qk-norm multipliers rotary-per-layer",
        # Ends in the middle of its period.
        HEAD, WINDOW, num_hidden_layers=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"] * 2),
    "glm": _case("glm", "dense partial-rotary biases fused-projections", HEAD),
    "glm4": _case("glm4", "dense partial-rotary biases fused-projections", HEAD),
    "granite": _case("granite", "dense multipliers", SCALES),
    "granite_swa": _case("granite_swa", "dense tied sliding sinks multipliers", SCALES, SLIDING_FULL),
    "helium": _case("helium", "dense", HEAD),
    "hunyuan_v1_dense": _case("hunyuan_v1_dense", "dense qk-norm", HEAD),
    "hyperclovax": _case("hyperclovax", "dense multipliers", HEAD, SCALES),
    "jais2": _case("jais2", "dense biases", HEAD),
    "llama": _case("llama", "dense"),
    "llama_rope_dynamic": _case("llama", "dense rope-scaling", _rotary("dynamic", factor=4.0)),
    "llama_rope_llama3": _case("llama", "dense rope-scaling",
        _rotary("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)),
    "llama_rope_yarn": _case("llama", "dense rope-scaling",
        _rotary("yarn", factor=4.0, original_max_position_embeddings=32)),
    "ministral": _case("ministral", "dense sliding", HEAD, WINDOW),
    "ministral3": _case("ministral3", "dense rope-scaling", HEAD),
    "mistral": _case("mistral", "dense sliding", HEAD, WINDOW),
    "mllama": _case("mllama", "dense", text_config={**BASE, "cross_attention_layers": []}),
    "modernbert-decoder": _case("modernbert-decoder", "dense tied sliding rotary-per-layer fused-projections",
        local_attention=16),
    "nanochat": _case("nanochat", "dense qk-norm softcap"),
    "nemotron": _case("nemotron", "dense partial-rotary"),
    "olmo": _case("olmo", "dense"),
    "olmo2": _case("olmo2", "dense qk-norm"),
    "olmo3": _case("olmo3", "dense sliding qk-norm", SLIDING_FULL),
    "persimmon": _case("persimmon", "dense qk-norm partial-rotary fused-projections biases"),
    "phi": _case("phi", "dense parallel-block partial-rotary biases"),
    "phi3": _case("phi3", "dense fused-projections"),
    "phi3_longrope": _case("phi3", "dense fused-projections rope-scaling",
        _rotary("longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8, original_max_position_embeddings=16,
            partial_rotary_factor=1.0), original_max_position_embeddings=16),
    "phi4_multimodal": _case("phi4_multimodal", "dense fused-projections",
        # Only the language model runs on text, but the other towers are built with it.
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 28, "crop_size": 28},
        audio_config={"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2,
            "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32, "input_size": 16,
            "bias_max_distance": 16}),
    "qwen2": _case("qwen2", "dense biases"),
    "qwen2_sliding": _case("qwen2", "dense biases sliding", WINDOW, use_sliding_window=True, max_window_layers=2),
    "qwen3": _case("qwen3", "dense qk-norm", HEAD),
    "seed_oss": _case("seed_oss", "dense biases", HEAD),
    "smollm3": _case("smollm3", "dense tied no-rotary"),
    "stablelm": _case("stablelm", "dense partial-rotary"),
    "starcoder2": _case("starcoder2", "dense tied sliding biases", WINDOW),
    "vaultgemma": _case("vaultgemma", "dense tied sliding softcap", HEAD, WINDOW),
    # Blocks whose attention and feed-forward run side by side.
    "codegen": _case("codegen", "parallel-block partial-rotary biases fused-projections own-attention",
        GPT, rotary_dim=8),
    "cohere": _case("cohere", "parallel-block tied multipliers"),
    "cohere2": _case("cohere2", "parallel-block tied sliding no-rotary multipliers", HEAD, SLIDING_FULL),
    "cohere_compass_text": _case("cohere_compass_text", "parallel-block tied sliding rotary-per-layer",
        SLIDING_FULL,
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 50000.0}}),
    "falcon": _case("falcon", "parallel-block tied fused-projections own-attention",
        new_decoder_architecture=True, num_kv_heads=2, alibi=False),
    "gpt_neox": _case("gpt_neox", "parallel-block partial-rotary fused-projections biases"),
    "gpt_neox_japanese": _case("gpt_neox_japanese", "dense tied fused-projections own-attention"),
    "gptj": _case("gptj", "parallel-block partial-rotary biases own-attention", GPT, rotary_dim=8),
    # Positions other than rotary.
    "biogpt": _case("biogpt", "learned-positions tied biases"),
    "bloom": _case("bloom", "alibi tied biases fused-projections own-attention", n_layer=4, n_head=4),
    "ctrl": _case("ctrl", "learned-positions tied biases", GPT, dff=96),
    "falcon_alibi": _case("falcon", "alibi tied biases fused-projections own-attention",
        new_decoder_architecture=False, multi_query=False, alibi=True, parallel_attn=False, bias=True),
    "gpt2": _case("gpt2", "learned-positions tied biases fused-projections transposed-linear", GPT),
    "gpt_bigcode": _case("gpt_bigcode", "learned-positions tied biases fused-projections", GPT),
    "gpt_neo": _case("gpt_neo", "learned-positions tied sliding biases own-attention",
        num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=8),
    "mpt": _case("mpt", "alibi tied fused-projections own-attention",
        d_model=64, n_heads=4, n_layers=4, max_seq_len=128),
    "openai-gpt": _case("openai-gpt", "learned-positions tied biases fused-projections transposed-linear own-attention",
        GPT),
    "opt": _case("opt", "learned-positions tied biases", ffn_dim=96, word_embed_proj_dim=64),
    "xglm": _case("xglm", "learned-positions tied biases own-attention",
        d_model=64, ffn_dim=96, num_layers=4, attention_heads=4),
    # Mixtures of experts.
    "afmoe": _case("afmoe", "mixture shared-expert sliding qk-norm no-rotary gated-attention",
        HEAD, EXPERTS, SLIDING_FULL, num_shared_experts=1),
    "aria_text": _case("aria_text", "mixture shared-expert", HEAD, moe_num_experts=4, moe_topk=2, intermediate_size=32),
    "beam": _case("beam", "mixture sliding softcap qk-norm gated-attention no-rotary",
        HEAD, EXPERTS, SLIDING_FULL, SPARSE_AFTER_FIRST, n_group=2, topk_group=1),
    "cohere2_moe": _case("cohere2_moe", "mixture parallel-block tied sliding no-rotary multipliers",
        HEAD, EXPERTS, SLIDING_FULL),
    "dbrx": _case("dbrx", "mixture fused-projections",
        d_model=64, n_heads=4, n_layers=4, max_seq_len=128,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}, hidden_size=None,
        num_attention_heads=None, num_hidden_layers=None, num_key_value_heads=None),
    "dots1": _case("dots1", "mixture shared-expert qk-norm", HEAD, ROUTED_EXPERTS, DENSE_FIRST),
    "ernie4_5_moe": _case("ernie4_5_moe", "mixture shared-expert tied",
        moe_intermediate_size=32, moe_k=2, moe_num_experts=4, moe_num_shared_experts=1),
    "exaone_moe": _case("exaone_moe", "mixture shared-expert sliding qk-norm no-rotary", HEAD, EXPERTS, SLIDING_FULL),
    "flex_olmo": _case("flex_olmo", "mixture qk-norm", num_experts=4, num_experts_per_tok=2),
    "flint": _case("flint", "mixture shared-expert sliding sinks qk-norm no-rotary",
        HEAD, EXPERTS, SHARED_EXPERT, SLIDING_FULL, mlp_only_layers=[0]),
    "glm4_moe": _case("glm4_moe", "mixture shared-expert partial-rotary", HEAD, ROUTED_EXPERTS, DENSE_FIRST),
    "gpt_oss": _case("gpt_oss", "mixture sliding sinks biases rope-scaling", HEAD, LOCAL_EXPERTS, WINDOW),
    "granitemoe": _case("granitemoe", "mixture multipliers", LOCAL_EXPERTS, SCALES),
    "granitemoe_swa": _case("granitemoe_swa", "mixture shared-expert sliding sinks multipliers",
        LOCAL_EXPERTS, SCALES, SLIDING_FULL, shared_intermediate_size=32),
    "granitemoeshared": _case("granitemoeshared", "mixture shared-expert", LOCAL_EXPERTS, shared_intermediate_size=32),
    "hunyuan_v1_moe": _case("hunyuan_v1_moe", "mixture shared-expert qk-norm", HEAD, EXPERTS, moe_topk=2),
    "hy_v3": _case("hy_v3", "mixture shared-expert qk-norm", HEAD, EXPERTS, num_shared_experts=1),
    "jetmoe": _case("jetmoe", "mixture tied fused-projections",
        num_local_experts=4, num_experts_per_tok=2, kv_channels=16, num_attention_heads=None),
    "kolibri1": _case("kolibri1", "mixture shared-expert sliding qk-norm no-rotary",
        HEAD, LOCAL_EXPERTS, SHARED_EXPERT, SLIDING_FULL),
    "laguna": _case("laguna", "mixture shared-expert sliding qk-norm gated-attention partial-rotary rotary-per-layer",
        HEAD, EXPERTS, SHARED_EXPERT, SLIDING_FULL, num_attention_heads_per_layer=[4, 8, 4, 8]),
    "llama4_text": _case("llama4_text", "mixture shared-expert chunked qk-norm no-rotary",
        HEAD, LOCAL_EXPERTS, num_experts_per_tok=1, intermediate_size_mlp=96, attention_chunk_size=8,
        interleave_moe_layer_step=2, no_rope_layers=[1, 0, 1, 0]),
    "mellum": _case("mellum", "mixture sliding qk-norm rotary-per-layer", HEAD, LOCAL_EXPERTS, SLIDING_FULL),
    "mimo_v2_flash": _case("mimo_v2_flash", "mixture sliding sinks partial-rotary rotary-per-layer",
        HEAD, ROUTED_EXPERTS, SLIDING_FULL, v_head_dim=8),
    "minimax_m2": _case("minimax_m2", "mixture qk-norm partial-rotary",
        HEAD, LOCAL_EXPERTS, _rotary("default", partial_rotary_factor=0.5)),
    "mixtral": _case("mixtral", "mixture", HEAD, LOCAL_EXPERTS),
    "olmoe": _case("olmoe", "mixture qk-norm", num_experts=4, num_experts_per_tok=2),
    "phimoe": _case("phimoe", "mixture biases", LOCAL_EXPERTS, attention_bias=True, lm_head_bias=True),
    "qwen2_moe": _case("qwen2_moe", "mixture shared-expert biases", EXPERTS, SHARED_EXPERT),
    "qwen3_moe": _case("qwen3_moe", "mixture qk-norm", HEAD, EXPERTS),
    "solar_open": _case("solar_open", "mixture shared-expert", HEAD, ROUTED_EXPERTS),
    # Latent attention, with or without experts.
    "axk1": _case("axk1", "mla mixture shared-expert", LATENT, ROUTED_EXPERTS),
    "deepseek_v2": _case("deepseek_v2", "mla mixture shared-expert",
        LATENT, ROUTED_EXPERTS, DENSE_FIRST, topk_method="greedy"),
    "deepseek_v3": _case("deepseek_v3", "mla mixture shared-expert", LATENT, ROUTED_EXPERTS, DENSE_FIRST, n_group=2),
    "glm4_moe_lite": _case("glm4_moe_lite", "mla mixture shared-expert", LATENT, ROUTED_EXPERTS),
    "longcat_flash": _case("longcat_flash", "mla mixture",
        LATENT, num_hidden_layers=None, head_dim=8, num_layers=2, ffn_hidden_size=96, expert_ffn_hidden_size=32,
        moe_topk=2, n_routed_experts=4, zero_expert_num=2),
    "minicpm3": _case("minicpm3", "mla tied multipliers", LATENT),
    "youtu": _case("youtu", "mla tied", LATENT),
    # Attention to keys chosen by a learned index, or to compressed keys.
    "axk2": _case("axk2", "indexed mla mixture shared-expert gated-attention",
        LATENT, ROUTED_EXPERTS, INDEX, SPARSE_AFTER_FIRST),
    "deepseek_v32": _case("deepseek_v32", "indexed mla mixture shared-expert",
        LATENT, ROUTED_EXPERTS, INDEX, SPARSE_AFTER_FIRST),
    "deepseek_v4": _case("deepseek_v4", "indexed compressed sliding sinks mixture shared-expert hyper-connections",
        HEAD, ROUTED_EXPERTS, INDEX, WINDOW, num_key_value_heads=1, q_lora_rank=24, o_groups=2, o_lora_rank=16,
        partial_rotary_factor=0.5, hc_mult=2,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"]),
    "glm_moe_dsa": _case("glm_moe_dsa", "indexed mla mixture shared-expert",
        LATENT, ROUTED_EXPERTS, INDEX, SPARSE_AFTER_FIRST),
    "hy_v4": _case("hy_v4", "indexed mla mixture shared-expert hyper-connections sinks gated-attention",
        LATENT, ROUTED_EXPERTS, INDEX, SPARSE_AFTER_FIRST, indexer_types=["full", "shared"] * 2, hc_mult=2),
    "minimax_m3_vl_text": _case("minimax_m3_vl_text", "indexed mixture shared-expert qk-norm partial-rotary",
        HEAD, LOCAL_EXPERTS, SPARSE_AFTER_FIRST, _rotary("default", partial_rotary_factor=0.5),
        layer_types=["full_attention", "minimax_m3_sparse"] * 2, dense_intermediate_size=96,
        shared_intermediate_size=32, index_n_heads=2, index_head_dim=16, index_block_size=4, index_topk_blocks=2),
    # Per-layer embeddings and shared keys.
    "gemma3n_text": _case("gemma3n_text", "per-layer-inputs sliding tied softcap qk-norm rotary-per-layer",
        HEAD, ALTUP, SLIDING_SLIDING_FULL, num_kv_shared_layers=0, activation_sparsity_pattern=[0.0] * 6),
    "gemma3n_text_shared_kv": _case("gemma3n_text",
        "per-layer-inputs shared-kv sliding tied softcap qk-norm rotary-per-layer",
        HEAD, ALTUP, SLIDING_SLIDING_FULL, num_kv_shared_layers=3, activation_sparsity_pattern=[0.95] * 2 + [0.0] * 4),
    "gemma4_text": _case("gemma4_text", "dense sliding tied qk-norm partial-rotary rotary-per-layer",
        GEMMA4_HEADS, SLIDING_SLIDING_FULL, hidden_size_per_layer_input=0),
    "gemma4_text_mixture": _case("gemma4_text", "mixture sliding tied qk-norm partial-rotary rotary-per-layer",
        GEMMA4_HEADS, SLIDING_SLIDING_FULL, EXPERTS, hidden_size_per_layer_input=0, enable_moe_block=True,
        top_k_experts=2),
    "gemma4_text_shared_kv": _case("gemma4_text",
        "per-layer-inputs shared-kv sliding tied qk-norm partial-rotary rotary-per-layer",
        GEMMA4_HEADS, SLIDING_SLIDING_FULL, hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCABULARY,
        num_kv_shared_layers=3),
    "gemma4_unified_text": _case("gemma4_unified_text", "dense sliding tied qk-norm partial-rotary rotary-per-layer",
        GEMMA4_HEADS, SLIDING_SLIDING_FULL),
    # State spaces, recurrences and hybrids.
    "bailing_hybrid": _case("bailing_hybrid", "hybrid gated-delta conv mla mixture shared-expert gated-attention",
        LATENT, KIMI_DELTA, LINEAR_FULL, SPARSE_AFTER_FIRST, num_experts=4, num_experts_per_token=2,
        num_shared_experts=1, moe_intermediate_size=32, num_expert_group=1, topk_group=1, q_lora_rank=None),
    "bamba": _case("bamba", "hybrid mamba2 partial-rotary", MAMBA2, attn_layer_indices=[1, 3]),
    "falcon_h1": _case("falcon_h1", "hybrid mamba2 multipliers", HEAD, MAMBA2, mamba_d_ssm=128),
    "falcon_mamba": _case("falcon_mamba", "mamba tied", state_size=8, conv_kernel=4, expand=2, time_step_rank=4),
    "granitemoehybrid": _case("granitemoehybrid", "hybrid mamba2 mixture shared-expert multipliers no-rotary",
        LOCAL_EXPERTS, MAMBA2, SCALES, shared_intermediate_size=32, layer_types=["mamba", "attention"] * 2),
    "inkling_text": _case("inkling_text", "hybrid conv sliding position-bias qk-norm mixture shared-expert no-rotary",
        HEAD, ROUTED_EXPERTS, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16,
        sliding_window_size=8, d_rel=4, rel_extent=16, tie_word_embeddings=False,
        layer_types=["hybrid_sliding", "hybrid"] * 2),
    "jamba": _case("jamba", "hybrid mamba mixture no-rotary",
        MAMBA, num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1),
    "kimi_linear": _case("kimi_linear", "hybrid gated-delta conv mla mixture shared-expert no-rotary",
        LATENT, KIMI_DELTA, LINEAR_FULL, num_experts=4, num_experts_per_token=2, num_shared_experts=1,
        moe_intermediate_size=32, q_lora_rank=None),
    "lfm2": _case("lfm2", "hybrid conv qk-norm tied", CONV_FULL, block_auto_adjust_ff_dim=False),
    "lfm2_moe": _case("lfm2_moe", "hybrid conv mixture qk-norm tied", EXPERTS, CONV_FULL, num_dense_layers=1),
    "mamba": _case("mamba", "mamba tied", state_size=8, conv_kernel=4, expand=2, time_step_rank=4),
    "mamba2": _case("mamba2", "mamba2", num_heads=8, head_dim=16, state_size=16, expand=2, n_groups=1, chunk_size=8),
    "minimax": _case("minimax", "hybrid linear-attention mixture", HEAD, LOCAL_EXPERTS, LINEAR_FULL, block_size=8),
    "nemotron_h": _case("nemotron_h", "hybrid mamba2 no-rotary",
        NEMOTRON_MAMBA2, layers_block_type=["mamba", "mlp", "attention", "mlp"] * 2),
    "nemotron_h_mixture": _case("nemotron_h", "hybrid mamba2 mixture shared-expert no-rotary",
        NEMOTRON_MAMBA2, layers_block_type=["mamba", "moe", "attention", "moe"] * 2, n_routed_experts=4,
        moe_intermediate_size=32, moe_shared_expert_intermediate_size=32),
    "olmo_hybrid": _case("olmo_hybrid", "hybrid gated-delta conv qk-norm", DELTA, LINEAR_FULL, linear_num_key_heads=4),
    "qwen3_5_text": _case("qwen3_5_text", "hybrid gated-delta conv qk-norm gated-attention partial-rotary",
        HEAD, DELTA, LINEAR_FULL),
    "qwen3_5_moe_text": _case("qwen3_5_moe_text",
        "hybrid gated-delta conv qk-norm gated-attention mixture shared-expert partial-rotary",
        HEAD, EXPERTS, SHARED_EXPERT, DELTA, LINEAR_FULL),
    "qwen3_next": _case("qwen3_next",
        "hybrid gated-delta conv qk-norm gated-attention mixture shared-expert partial-rotary",
        HEAD, EXPERTS, SHARED_EXPERT, DELTA, LINEAR_FULL),
    "qwen4_exp_text": _case("qwen4_exp_text",
        "hybrid gated-delta conv indexed qk-norm per-layer-inputs hyper-connections mixture shared-expert",
        HEAD, EXPERTS, SHARED_EXPERT, DELTA, hc_count=2, hc_lowrank=8, ple_layer_ids=[1], ple_embed_dim=16,
        ngram_vocab_size_base=64, split_ngram_parts=1, make_ngram_vocab_size_divisible_by=1, heads_per_ngram=2,
        indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4,
        layer_types=["linear_attention", "indexed_attention"] * 2),
    "recurrent_gemma": _case("recurrent_gemma", "hybrid recurrent conv sliding softcap tied partial-rotary",
        num_hidden_layers=6, lru_width=64, attention_window_size=8,
        block_types=["recurrent", "recurrent", "attention"]),
    "rwkv": _case("rwkv", "recurrent", attention_hidden_size=64, context_length=128),
    "xlstm": _case("xlstm", "recurrent softcap", num_heads=4, num_blocks=4, embedding_dim=64, chunk_size=8),
    # Five layers: with six, single tokens amplify rounding so much that PyTorch's float32 is 6e-5 off its float64.
    "zamba": _case("zamba", "hybrid mamba shared-weights tied no-rotary",
        MAMBA, ALL_HEADS, num_hidden_layers=5, attention_hidden_size=128, attention_head_dim=32, n_mamba_heads=2,
        attn_layer_period=2, attn_layer_offset=1),
    "zamba2": _case("zamba2", "hybrid mamba2 shared-weights tied",
        ALL_HEADS, layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=16,
        n_mamba_heads=8, mamba_headdim=16, mamba_ngroups=1, chunk_size=8, num_mem_blocks=1, use_mem_rope=True,
        adapter_rank=8, attention_head_dim=32, attention_hidden_size=128),
    "zaya": _case("zaya", "hybrid conv mixture tied sliding qk-norm partial-rotary rotary-per-layer",
        HEAD, EXPERTS, WINDOW, num_experts_per_tok=1, router_hidden_size=16,
        layer_types=["hybrid_sliding", "hybrid"] * 2),
    "hrm_text": _case("hrm_text", "shared-weights dense gated-attention",
        HEAD, num_hidden_layers=2, H_cycles=2, L_cycles=2),
}
# fmt: on


# These cover every mechanism at least once.
SUITE: tuple[str, ...] = (
    "qwen3",
    "gemma2",
    "gemma4_text_shared_kv",
    "diffllama",
    "cohere2",
    "gpt2",
    "bloom",
    "gpt_oss",
    "llama4_text",
    "mixtral",
    "deepseek_v3",
    "qwen3_next",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "zamba2",
    "lfm2",
    "inkling_text",
    "hy_v4",
    "deepseek_v4",
    "minimax_m3_vl_text",
    "minimax",
    "recurrent_gemma",
)


def _because(reason: str, model_types: str) -> dict[str, str]:
    return dict.fromkeys(model_types.split(), reason)


NOT_COVERED: dict[str, str] = {
    **_because(
        "a masked-language-model encoder run as a decoder",
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta"
        " roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod",
    ),
    **_because(
        "the decoder of an encoder-decoder model, not a language model by itself",
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper",
    ),
    **_because("multimodal wrapper; its language model is the case gemma3_text", "gemma3"),
    **_because("multimodal wrapper; its language model is the case gemma3n_text", "gemma3n"),
    **_because("multimodal wrapper; its language model is the case gemma4_text", "gemma4"),
    **_because("multimodal wrapper; its language model is the case gemma4_unified_text", "gemma4_unified"),
    **_because("multimodal wrapper; its language model is the case persimmon", "fuyu"),
    **_because("multimodal wrapper; its language model is the case qwen2", "got_ocr2"),
    **_because("multimodal wrapper; its language model is the case qwen3", "moss_transcribe_diarize"),
    **_because("composite configuration; builds the model of the case llama4_text", "llama4"),
    **_because("composite configuration; builds the model of the case qwen3_5_text", "qwen3_5"),
    **_because("composite configuration; builds the model of the case qwen3_5_moe_text", "qwen3_5_moe"),
    **_because("composite configuration; builds the model of the case qwen4_exp_text", "qwen4_exp"),
    **_because("same class as the case gpt2", "gpt-sw3"),
    **_because("captions images; text alone is not its use", "git"),
    **_because("generates audio codes, several per position", "musicgen musicgen_melody"),
    **_because("the text stream of a speech model", "moshi"),
    **_because(
        "drafts tokens from another model's hidden states and keys", "gemma4_assistant gemma4_unified_assistant"
    ),
    **_because("patch lengths depend on the bytes, so shapes depend on values", "blt"),
    **_because("hashes tokens into buckets and pads to multiples of them; legacy", "reformer"),
    **_because("permutation language model, not causal by default; legacy", "xlnet"),
    **_because("masked language model unless configured otherwise; legacy", "xlm"),
    **_because("bidirectional attention after its own prompt tokens; legacy", "cpmant"),
}


def configuration(name: str, num_layers: int | None = None) -> PreTrainedConfig:
    """The case's configuration, as a checkpoint of that type would have it; with other than its usual number of layers
    unless the case lists the type of each."""
    wrapper = WRAPPERS.get(name)
    case = CASES[name] if wrapper is None else CASES.get(wrapper.text, Case(wrapper.text, {}, ()))
    changes = {} if wrapper is None else wrapper.text_changes
    settings = {key: value for key, value in {**BASE, **case.overrides, **changes}.items() if value is not None}
    if num_layers is not None and not {"layer_types", "mlp_layer_types", "no_rope_layers"} & settings.keys():
        settings["num_hidden_layers"] = num_layers
    # The configuration keeps references to these values and transformers edits them in place, so copy them.
    if wrapper is None:
        return AutoConfig.for_model(case.model_type, **deepcopy(settings))
    text = {"model_type": case.model_type, **deepcopy(settings)}
    config = AutoConfig.for_model(wrapper.model_type, text_config=text, **deepcopy(wrapper.others))
    config.architectures = [multimodal_class(wrapper.model_type)]
    return config


def build(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, num_layers: int | None = None
) -> PreTrainedModel:
    """The case's model in eval mode, with random weights; attention and experts are plain PyTorch.

    In other dtypes the weights are the rounded weights of the float32 model with the same seed.
    """
    torch.manual_seed(seed)
    config = configuration(name, num_layers)
    model = getattr(transformers, auto_class(config)).from_config(config, attn_implementation="eager", dtype=dtype)
    model.config.use_cache = False
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    if dtype == torch.float32:
        _add_noise(model, seed)
    else:
        model.load_state_dict(build(name, seed=seed, num_layers=num_layers).state_dict())
    return model.eval()


def _add_noise(model: PreTrainedModel, seed: int) -> None:
    """New models have norms of one, and biases, gates and sinks of zero: a mistake in their use would not show."""
    generator = torch.Generator().manual_seed(seed)

    def noise(like: torch.Tensor) -> torch.Tensor:
        scale = 0.1 if like.ndim >= 2 else 0.05
        return (scale * torch.randn(like.shape, generator=generator)).to(like.dtype)

    parameter_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise(parameter))
        for name, buffer in model.state_dict().items():
            # Buffers that a checkpoint would set: routing biases, layer scales, routing tables.
            if name in parameter_names or not ((buffer == 0).all() or (buffer == 1).all()):
                continue
            if buffer.is_floating_point():
                buffer.add_(noise(buffer))
            else:
                buffer.copy_(torch.randint(0, 2, buffer.shape, generator=generator))


def buildable(names: Iterable[str] = CASES) -> list[str]:
    """The cases whose model type exists in the installed transformers."""
    return [name for name in names if CASES[name].model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def uncovered() -> dict[str, str | None]:
    """Causal model types of the installed transformers without a case, and the reason (None: not decided yet)."""
    covered = {case.model_type for case in CASES.values()}
    return {
        model_type: NOT_COVERED.get(model_type)
        for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if model_type not in covered
    }
