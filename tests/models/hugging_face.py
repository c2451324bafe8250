"""Architectures of transformers, with tiny random configurations."""

from __future__ import annotations

import torch

from .row import DTYPES, Row, image, without_dropout

WORDS, LENGTH = 32, 8
IMAGE = WORDS - 1  # the placeholder token of an image
TOKENS = {
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "max_position_embeddings": 32,
}
LAYERS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**TOKENS, **LAYERS}
GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
EXPERTS = {
    **GROUPED,
    "num_experts_per_tok": 2,
    "num_experts": 3,
    "num_local_experts": 3,
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
GPT = {**TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
HALVES = {
    **TOKENS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
T5 = {**TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
MAMBA = {**TOKENS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
DISTIL = {**TOKENS, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}
XLM = {**TOKENS, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "n_langs": 1}
VISION = {**LAYERS, "image_size": 16, "patch_size": 8}
STAGES = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
AUDIO = {
    **TEXT,
    "conv_dim": [8, 8],
    "conv_stride": [4, 2],
    "conv_kernel": [8, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "classifier_proj_size": 8,
}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
TOWERS = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 8}


def words(rows, length=LENGTH):
    return torch.randint(3, WORDS, (rows, length))


def text(rows):
    return {"input_ids": words(rows)}


def masked_text(rows):
    """Texts; every second one is padded."""
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    mask[::2, LENGTH - 2 :] = 0
    return {"input_ids": words(rows), "attention_mask": mask}


def two_texts(rows):
    return {**masked_text(rows), "decoder_input_ids": words(rows, 6)}


def choices(rows):
    return {"input_ids": torch.randint(3, WORDS, (rows, 3, LENGTH))}


def text_and_image(side=16):
    return lambda rows: {**text(rows), "pixel_values": torch.randn(rows, 3, side, side)}


def image_with_order(rows):
    return {"pixel_values": torch.randn(rows, 3, 16, 16), "noise": torch.rand(rows, 4)}


def sound(rows):
    return {"input_values": torch.randn(rows, 128)}


def spectrum(rows):
    return {"input_features": torch.randn(rows, 8, 16), "decoder_input_ids": words(rows, 6)}


def frames(rows):
    return {"input_features": torch.randn(rows, 16, 8), "decoder_input_ids": words(rows, 6)}


def objects(rows):
    return {**text(rows), "visual_feats": torch.randn(rows, 3, 8), "visual_pos": torch.rand(rows, 3, 4)}


def boxes(rows):
    return {**text(rows), "bbox": torch.tensor([1, 1, 5, 7]).repeat(rows, LENGTH, 1)}


def series(rows):
    return {"past_values": torch.randn(rows, 32, 2)}


def picture_in_text(rows):
    """Texts with four positions for the patches of an image."""
    ids = words(rows).clamp(max=IMAGE - 1)
    ids[:, :4] = IMAGE
    return {"input_ids": ids, "pixel_values": torch.randn(rows, 3, 16, 16)}


PIXELS = lambda side: image(side, name="pixel_values")  # noqa: E731
IMAGE_TOWER = {**VISION, "image_size": 16, "patch_size": 8, "model_type": "clip_vision_model"}
LANGUAGE_TOWER = {**GROUPED, "model_type": "llama"}

CAUSAL = {
    "GPT2LMHeadModel": (GPT, text),
    "GPTNeoForCausalLM": (
        {
            **TOKENS,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
        text,
    ),
    "GPTNeoXForCausalLM": (TEXT, text),
    "GPTJForCausalLM": ({**GPT, "rotary_dim": 4}, text),
    "CodeGenForCausalLM": ({**GPT, "n_head": 4, "rotary_dim": 4}, text),
    "GPTBigCodeForCausalLM": (GPT, text),
    "OpenAIGPTLMHeadModel": (GPT, text),
    "CTRLLMHeadModel": ({**GPT, "dff": 24}, text),
    "LlamaForCausalLM": (GROUPED, masked_text),
    "MistralForCausalLM": ({**GROUPED, "sliding_window": 4}, text),
    "Qwen2ForCausalLM": (GROUPED, masked_text),
    "Qwen3ForCausalLM": (GROUPED, text),
    "GemmaForCausalLM": (GROUPED, text),
    "Gemma2ForCausalLM": (GROUPED, text),
    "Gemma3ForCausalLM": (GROUPED, text),
    "PhiForCausalLM": (TEXT, text),
    "Phi3ForCausalLM": (GROUPED, text),
    "OPTForCausalLM": ({**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16}, masked_text),
    "BloomForCausalLM": ({**TOKENS, "hidden_size": 16, "n_layer": 2, "n_head": 2}, text),
    "FalconForCausalLM": (TEXT, text),
    "MptForCausalLM": ({**TOKENS, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32}, text),
    "StableLmForCausalLM": (GROUPED, text),
    "CohereForCausalLM": (GROUPED, text),
    "OlmoForCausalLM": (GROUPED, text),
    "Olmo2ForCausalLM": (GROUPED, text),
    "GraniteForCausalLM": (GROUPED, text),
    "SmolLM3ForCausalLM": (GROUPED, text),
    "Starcoder2ForCausalLM": (GROUPED, text),
    "XGLMForCausalLM": ({**TOKENS, "d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 2}, text),
    "BioGptForCausalLM": (TEXT, text),
    "PersimmonForCausalLM": (TEXT, text),
    "NemotronForCausalLM": (GROUPED, text),
    "GlmForCausalLM": (GROUPED, text),
    "XLNetLMHeadModel": ({"vocab_size": WORDS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}, text),
}
MIXED = {
    "MixtralForCausalLM": (EXPERTS, text),
    "Qwen2MoeForCausalLM": (EXPERTS, text),
    "Qwen3MoeForCausalLM": (EXPERTS, text),
    "OlmoeForCausalLM": (EXPERTS, text),
    "PhimoeForCausalLM": (EXPERTS, text),
    "GptOssForCausalLM": (EXPERTS, text),
    "GraniteMoeForCausalLM": (EXPERTS, text),
    "DeepseekV3ForCausalLM": (
        {
            **EXPERTS,
            "head_dim": 4,
            "num_key_value_heads": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
        text,
    ),
    "SwitchTransformersForConditionalGeneration": ({**T5, "num_experts": 3, "expert_capacity": 64}, two_texts),
}
STATE = {
    "MambaForCausalLM": (MAMBA, text),
    "Mamba2ForCausalLM": ({**MAMBA, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}, text),
    "FalconMambaForCausalLM": (MAMBA, text),
    "RwkvForCausalLM": ({**MAMBA, "attention_hidden_size": 16, "intermediate_size": 24, "context_length": 32}, text),
    "RecurrentGemmaForCausalLM": (
        {**GROUPED, "lru_width": 16, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
        text,
    ),
    "JambaForCausalLM": (
        {
            **EXPERTS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        text,
    ),
    "BambaForCausalLM": (
        {
            **GROUPED,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 4,
            "attn_layer_indices": [1],
        },
        text,
    ),
}
ENCODERS = {
    "BertForMaskedLM": (TEXT, masked_text),
    "RobertaForMaskedLM": (TEXT, masked_text),
    "XLMRobertaForSequenceClassification": (TEXT, masked_text),
    "DistilBertForMaskedLM": (DISTIL, masked_text),
    "AlbertForMaskedLM": ({**TEXT, "embedding_size": 8}, masked_text),
    "ElectraForPreTraining": ({**TEXT, "embedding_size": 8}, masked_text),
    "MPNetForMaskedLM": (TEXT, masked_text),
    "DebertaForMaskedLM": ({**TEXT, **RELATIVE}, masked_text),
    "DebertaV2ForMaskedLM": ({**TEXT, **RELATIVE}, masked_text),
    "LongformerForMaskedLM": ({**TEXT, "attention_window": 4}, text),
    "BigBirdForMaskedLM": ({**TEXT, "attention_type": "original_full"}, text),
    "FNetForMaskedLM": (TEXT, text),
    "ConvBertForMaskedLM": ({**TEXT, "embedding_size": 16, "conv_kernel_size": 3, "head_ratio": 1}, text),
    "ModernBertForMaskedLM": ({**TEXT, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}, masked_text),
    "XLMWithLMHeadModel": (XLM, text),
    "FlaubertWithLMHeadModel": (XLM, text),
    "NystromformerForMaskedLM": ({**TEXT, "num_landmarks": 4, "segment_means_seq_len": 8}, text),
    "MobileBertForMaskedLM": ({**TEXT, "embedding_size": 16, "intra_bottleneck_size": 8, "true_hidden_size": 8}, text),
    "SqueezeBertForMaskedLM": (
        {
            **TEXT,
            "embedding_size": 16,
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "post_attention_groups": 1,
            "intermediate_groups": 2,
            "output_groups": 2,
        },
        text,
    ),
    "MegatronBertForMaskedLM": (TEXT, text),
    "RoFormerForMaskedLM": ({**TEXT, "embedding_size": 16}, text),
    "FunnelForMaskedLM": (
        {
            **TOKENS,
            "block_sizes": [1, 1],
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 24,
            "num_decoder_layers": 1,
        },
        text,
    ),
    "RemBertForMaskedLM": ({**TEXT, "input_embedding_size": 8, "output_embedding_size": 8}, text),
    "ErnieForMaskedLM": (TEXT, text),
    "EsmForMaskedLM": ({**TEXT, "mask_token_id": 3}, text),
    "YosoForMaskedLM": ({**TEXT, "use_expectation": True}, text),
    "CanineForSequenceClassification": (
        {
            **TEXT,
            "num_hash_buckets": 16,
            "downsampling_rate": 2,
            "local_transformer_stride": 4,
            "upsampling_kernel_size": 2,
        },
        text,
    ),
    "BertForMultipleChoice": (TEXT, choices),
    "MPNetForMultipleChoice": (TEXT, choices),
    "DebertaV2ForSequenceClassification": ({**TEXT, **RELATIVE}, masked_text),
    "LayoutLMForMaskedLM": ({**TEXT, "max_2d_position_embeddings": 16}, boxes),
}
SEQ2SEQ = {
    "T5ForConditionalGeneration": (T5, two_texts),
    "MT5ForConditionalGeneration": (T5, two_texts),
    "UMT5ForConditionalGeneration": (T5, two_texts),
    "LongT5ForConditionalGeneration": ({**T5, "local_radius": 4}, two_texts),
    "BartForConditionalGeneration": (HALVES, two_texts),
    "MBartForConditionalGeneration": (HALVES, two_texts),
    "MarianMTModel": (HALVES, two_texts),
    "PegasusForConditionalGeneration": (HALVES, two_texts),
    "PegasusXForConditionalGeneration": ({**HALVES, "num_global_tokens": 2, "block_size": 4}, two_texts),
    "BlenderbotForConditionalGeneration": (HALVES, two_texts),
    "BlenderbotSmallForConditionalGeneration": (HALVES, two_texts),
    "M2M100ForConditionalGeneration": (HALVES, two_texts),
    "LEDForConditionalGeneration": (
        {**HALVES, "attention_window": 4, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32},
        two_texts,
    ),
    "ProphetNetForConditionalGeneration": (
        {
            **TOKENS,
            "hidden_size": 16,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 2,
            "num_decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "ngram": 2,
            "num_buckets": 8,
            "relative_max_distance": 16,
        },
        two_texts,
    ),
}
IMAGES = {
    "ViTForImageClassification": (VISION, PIXELS(16)),
    "DeiTForImageClassification": (VISION, PIXELS(16)),
    "BeitForImageClassification": ({**VISION, "use_relative_position_bias": True}, PIXELS(16)),
    "Data2VecVisionForImageClassification": ({**VISION, "use_relative_position_bias": True}, PIXELS(16)),
    "ViTMAEForPreTraining": (
        {
            **VISION,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 24,
        },
        image_with_order,
    ),
    "Dinov2ForImageClassification": (VISION, PIXELS(16)),
    "SwinForImageClassification": (STAGES, PIXELS(32)),
    "Swinv2ForImageClassification": (STAGES, PIXELS(32)),
    "SwinForMaskedImageModeling": ({**STAGES, "encoder_stride": 4}, PIXELS(32)),
    "ConvNextForImageClassification": ({"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, PIXELS(32)),
    "ConvNextV2ForImageClassification": ({"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, PIXELS(32)),
    "ResNetForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        PIXELS(32),
    ),
    "RegNetForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
        PIXELS(32),
    ),
    "BitForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 2},
        PIXELS(32),
    ),
    "MobileNetV1ForImageClassification": ({"depth_multiplier": 0.25}, PIXELS(32)),
    "MobileNetV2ForImageClassification": ({"depth_multiplier": 0.25}, PIXELS(32)),
    "MobileViTForImageClassification": (
        {"image_size": 32, "hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [8] * 7, "num_attention_heads": 2},
        PIXELS(32),
    ),
    "EfficientNetForImageClassification": (
        {"image_size": 32, "width_coefficient": 0.2, "depth_coefficient": 0.2, "hidden_dim": 256},
        PIXELS(32),
    ),
    "LevitForImageClassification": (
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [4, 4, 4],
            "drop_path_rate": 0,
            "kernel_size": 3,
            "stride": 2,
        },
        PIXELS(64),
    ),
    "PoolFormerForImageClassification": ({"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}, PIXELS(64)),
    "SegformerForImageClassification": (
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 8,
        },
        PIXELS(32),
    ),
    "SegformerForSemanticSegmentation": (
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 8,
        },
        PIXELS(32),
    ),
    "CvtForImageClassification": (
        {"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.0]},
        PIXELS(32),
    ),
    "PvtForImageClassification": (
        {"image_size": 32, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]},
        PIXELS(32),
    ),
    "FocalNetForImageClassification": (
        {
            "image_size": 32,
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "focal_levels": [1, 1],
            "focal_windows": [3, 3],
        },
        PIXELS(32),
    ),
    "HieraForImageClassification": (
        {
            "image_size": [32, 32],
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "query_stride": [2, 2],
            "masked_unit_size": [4, 4],
            "masked_unit_attention": [True, False],
            "num_query_pool": 1,
        },
        PIXELS(32),
    ),
    "SwiftFormerForImageClassification": (
        {"image_size": 32, "depths": [1, 1, 1, 1], "embed_dims": [8, 8, 16, 16]},
        PIXELS(64),
    ),
    "CLIPVisionModelWithProjection": ({**VISION, "projection_dim": 8}, PIXELS(16)),
    "SiglipForImageClassification": ({"vision_config": VISION}, PIXELS(16)),
    "DPTForSemanticSegmentation": (
        {
            **VISION,
            "image_size": 32,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
            "use_auxiliary_head": False,
            "reassemble_factors": [4, 2, 1, 0.5],
        },
        PIXELS(32),
    ),
}
SOUND = {
    "Wav2Vec2ForSequenceClassification": (AUDIO, sound),
    "Wav2Vec2ForCTC": ({**AUDIO, "feat_extract_norm": "layer", "do_stable_layer_norm": True}, sound),
    "HubertForSequenceClassification": (AUDIO, sound),
    "WavLMForSequenceClassification": ({**AUDIO, "num_buckets": 8}, sound),
    "SEWForSequenceClassification": ({**AUDIO, "squeeze_factor": 2}, sound),
    "UniSpeechForSequenceClassification": ({**AUDIO, "num_codevectors_per_group": 4}, sound),
    "Data2VecAudioForSequenceClassification": (
        {**AUDIO, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3},
        sound,
    ),
    "Wav2Vec2ConformerForSequenceClassification": (AUDIO, sound),
    "WhisperForConditionalGeneration": (
        {**HALVES, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
        spectrum,
    ),
    "Speech2TextForConditionalGeneration": (
        {
            **HALVES,
            "input_feat_per_channel": 8,
            "conv_channels": 8,
            "max_source_positions": 32,
            "max_target_positions": 16,
        },
        frames,
    ),
    "ASTForAudioClassification": (
        {**LAYERS, "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 8},
        lambda rows: {"input_values": torch.randn(rows, 16, 8)},
    ),
}
SEVERAL = {
    "CLIPModel": (TOWERS, text_and_image()),
    "SiglipModel": (TOWERS, text_and_image()),
    "AltCLIPModel": ({**TOWERS, "text_config": {**TEXT, "project_dim": 16}}, text_and_image()),
    "ChineseCLIPModel": (TOWERS, text_and_image()),
    "BlipForConditionalGeneration": (TOWERS, text_and_image()),
    "ViltForQuestionAnswering": ({**TEXT, **VISION, "num_labels": 3}, text_and_image()),
    "LxmertForQuestionAnswering": (
        {
            **TEXT,
            "l_layers": 1,
            "x_layers": 1,
            "r_layers": 1,
            "visual_feat_dim": 8,
            "visual_pos_dim": 4,
            "num_qa_labels": 3,
        },
        objects,
    ),
    "VisualBertForVisualReasoning": (
        {**TEXT, "visual_embedding_dim": 8},
        lambda rows: {**text(rows), "visual_embeds": torch.randn(rows, 3, 8)},
    ),
    "GitForCausalLM": ({**TEXT, "vision_config": VISION}, text_and_image()),
    "LayoutLMv3ForSequenceClassification": (
        {
            **TEXT,
            "input_size": 16,
            "patch_size": 8,
            "coordinate_size": 2,
            "shape_size": 4,
            "visual_embed": True,
            "max_2d_position_embeddings": 16,
        },
        lambda rows: {**boxes(rows), "pixel_values": torch.randn(rows, 3, 16, 16)},
    ),
    "LlavaForConditionalGeneration": (
        {
            "text_config": LANGUAGE_TOWER,
            "vision_config": IMAGE_TOWER,
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
        picture_in_text,
    ),
    "PaliGemmaForConditionalGeneration": (
        {
            "text_config": {**GROUPED, "model_type": "gemma"},
            "vision_config": {**VISION, "model_type": "siglip_vision_model", "projection_dim": 16},
            "image_token_id": IMAGE,
            "projection_dim": 16,
            "hidden_size": 16,
        },
        picture_in_text,
    ),
    "VisionTextDualEncoderModel": (
        {"vision_config": IMAGE_TOWER, "text_config": {**TEXT, "model_type": "bert"}, "projection_dim": 8},
        text_and_image(),
    ),
}
OTHERS = {
    "PatchTSTForPrediction": (
        {
            "num_input_channels": 2,
            "context_length": 32,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 24,
        },
        series,
    ),
    "PatchTSMixerForPrediction": (
        {
            "num_input_channels": 2,
            "context_length": 32,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 8,
            "num_layers": 2,
        },
        series,
    ),
    "DecisionTransformerModel": (
        {"state_dim": 4, "act_dim": 2, "hidden_size": 16, "n_layer": 1, "n_head": 2, "max_ep_len": 32},
        lambda rows: {
            "states": torch.randn(rows, 5, 4),
            "actions": torch.randn(rows, 5, 2),
            "rewards": torch.randn(rows, 5, 1),
            "returns_to_go": torch.randn(rows, 5, 1),
            "timesteps": torch.arange(5).repeat(rows, 1),
        },
    ),
}
GROUPS = {
    "Causal language models": CAUSAL,
    "Mixtures of experts": MIXED,
    "State-space and recurrent models": STATE,
    "Encoders": ENCODERS,
    "Encoders with a decoder": SEQ2SEQ,
    "Images": IMAGES,
    "Audio": SOUND,
    "Text and images": SEVERAL,
    "Series and actions": OTHERS,
}
BOTH = ("text_embeds", "image_embeds")
OUTPUTS = dict.fromkeys(
    ["CLIPModel", "SiglipModel", "AltCLIPModel", "ChineseCLIPModel", "VisionTextDualEncoderModel"], BOTH
)
OUTPUTS["DecisionTransformerModel"] = ("state_preds", "action_preds", "return_preds")


def make(name, sizes):
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = kind.config_class(**sizes)
    _turn_dropout_off(config)
    model = kind(config)
    if getattr(config, "num_experts_per_tok", None):  # the products of experts that are default are not for every dtype
        model.set_experts_implementation("eager")
    return without_dropout(model)


def _turn_dropout_off(config):
    for key, value in list(vars(config).items()):
        if ("drop" in key or "noise" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
        elif hasattr(value, "to_dict"):
            _turn_dropout_off(value)


FLOAT32_ONLY = {"FNetForMaskedLM", "NystromformerForMaskedLM"}


def rows():
    return [
        Row(
            group,
            name,
            lambda name=name, sizes=sizes: make(name, sizes),
            batch,
            "transformers",
            OUTPUTS.get(name, ()),
            (torch.float32,) if name in FLOAT32_ONLY else DTYPES,
        )
        for group, models in GROUPS.items()
        for name, (sizes, batch) in models.items()
    ]
