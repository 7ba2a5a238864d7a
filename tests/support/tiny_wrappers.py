"""Tiny multimodal models: the text models of `tiny_models.py` inside the wrappers that checkpoints have in 2026.

A wrapper is given by its type, the case of its text model (or its type) with changes, and the settings of its other
parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER}
CLIP = {"model_type": "clip_vision_model", **TOWER}
# Of half of a head of 16: one section each for time, height and width.
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
MROPE = {"head_dim": 16, "rope_parameters": SECTIONS}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Wrapper:
    model_type: str
    text: str  # a case of `tiny_models.CASES`, or a model type
    text_changes: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


WRAPPERS = {
    "aria": Wrapper("aria", "aria_text", {}, {"vision_config": {"model_type": "idefics3_vision", **TOWER},
        "projector_patch_to_query_dict": {"4": 2}}),
    "ernie4_5_vl_moe": Wrapper("ernie4_5_vl_moe", "ernie4_5_vl_moe_text",
        {"rope_parameters": {**SECTIONS, "mrope_section": [3, 3, 2]}, "moe_num_experts": 4, "moe_k": 2,
         "moe_intermediate_size": [32, 16], "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        {"vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}}),
    "gemma3": Wrapper("gemma3", "gemma3_text", {}, {"vision_config": SIGLIP, "mm_tokens_per_image": 4}),
    "gemma4": Wrapper("gemma4", "gemma4_text_shared_kv", {},
        {"vision_config": {**TOWER, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}}),
    "glm4v": Wrapper("glm4v", "glm4v_text", {"rope_parameters": SECTIONS},
        {"vision_config": {**QWEN_TOWER, "image_size": 28}}),
    "glm4v_moe": Wrapper("glm4v_moe", "glm4v_moe_text",
        {"rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 2]}, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32},
        {"vision_config": {**QWEN_TOWER, "image_size": 28}}),
    "idefics3": Wrapper("idefics3", "llama", {}, {"vision_config": TOWER}),
    "internvl": Wrapper("internvl", "qwen2", {},
        {"vision_config": {**TOWER, "image_size": [28, 28], "patch_size": [14, 14]}}),
    "kimi_k25": Wrapper("kimi_k25", "deepseek_v3", {}, {"vision_config": {"hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4},
        "projection_hidden_size": 32}),
    "lfm2_vl": Wrapper("lfm2_vl", "lfm2", {}, {"vision_config": {"model_type": "siglip2_vision_model",
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_patches": 16}}),
    "llama4": Wrapper("llama4", "llama4_text", {},
        {"vision_config": {**TOWER, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}}),
    "llava": Wrapper("llava", "llama", {}, {"vision_config": CLIP}),
    "llava_onevision": Wrapper("llava_onevision", "qwen2", {}, {"vision_config": SIGLIP}),
    "mistral3": Wrapper("mistral3", "mistral", {}, {"vision_config": {"model_type": "pixtral", **TOWER}}),
    "qwen2_vl": Wrapper("qwen2_vl", "qwen2_vl_text", {"rope_parameters": SECTIONS},
        {"vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}}),
    "qwen2_5_vl": Wrapper("qwen2_5_vl", "qwen2_5_vl_text", {"rope_parameters": SECTIONS},
        {"vision_config": {**QWEN_TOWER, "fullatt_block_indexes": [1]}}),
    "qwen3_vl": Wrapper("qwen3_vl", "qwen3_vl_text", MROPE,
        {"vision_config": {**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}}),
    "qwen3_vl_moe": Wrapper("qwen3_vl_moe", "qwen3_vl_moe_text", {**MROPE, **EXPERTS},
        {"vision_config": {**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}}),
    "qwen3_5": Wrapper("qwen3_5", "qwen3_5_text", {},
        {"vision_config": {**QWEN_TOWER, "num_position_embeddings": 16}}),
    "qwen3_5_moe": Wrapper("qwen3_5_moe", "qwen3_5_moe_text", {},
        {"vision_config": {**QWEN_TOWER, "num_position_embeddings": 16}}),
    "smolvlm": Wrapper("smolvlm", "llama", {}, {"vision_config": TOWER}),
    "voxtral": Wrapper("voxtral", "llama", {}, {"audio_config": {"hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 16}}),
}  # fmt: skip
