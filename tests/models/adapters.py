"""PEFT tuners on a small causal language model."""

from __future__ import annotations

import tempfile

import torch
from torch import nn

from .hugging_face import GROUPED, make, text
from .row import DTYPES, Row, without_dropout

QUERIES = {"target_modules": ["q_proj", "v_proj"]}
INNER = {"target_modules": ["q_proj", "o_proj"]}  # matrices of one shape
LOW_RANK = {**QUERIES, "r": 4}
VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
TUNERS = {
    "LoRA": ("LoraConfig", LOW_RANK),
    "LoRA, initialized for all layers": ("LoraConfig", {"r": 4, "target_modules": "all-linear"}),
    "LoRA, on embeddings": ("LoraConfig", {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "LoRA, with biases": ("LoraConfig", {**LOW_RANK, "lora_bias": True}),
    "LoRA, rank-stabilized": ("LoraConfig", {**LOW_RANK, "use_rslora": True}),
    "LoRA, with layers that train": ("LoraConfig", {**LOW_RANK, "modules_to_save": ["lm_head"]}),
    "DoRA": ("LoraConfig", {**LOW_RANK, "use_dora": True}),
    "PiSSA": ("LoraConfig", {**LOW_RANK, "init_lora_weights": "pissa"}),
    "OLoRA": ("LoraConfig", {**LOW_RANK, "init_lora_weights": "olora"}),
    "AdaLoRA": ("AdaLoraConfig", {**QUERIES, "init_r": 4, "target_r": 2, "total_step": 10}),
    "VeRA": ("VeraConfig", {**INNER, "r": 4}),
    "LoHa": ("LoHaConfig", LOW_RANK),
    "LoKr": ("LoKrConfig", LOW_RANK),
    "OFT": ("OFTConfig", {**QUERIES, "oft_block_size": 4, "r": 0}),
    "BOFT": ("BOFTConfig", {**QUERIES, "boft_block_size": 4}),
    "HRA": ("HRAConfig", LOW_RANK),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LayerNorm tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "FourierFT": ("FourierFTConfig", {**QUERIES, "n_frequency": 10}),
    "WaveFT": ("WaveFTConfig", {**INNER, "n_frequency": 10}),
    "VB-LoRA": ("VBLoRAConfig", {**LOW_RANK, "num_vectors": 16, "vector_length": 4}),
    "RandLoRA": ("RandLoraConfig", LOW_RANK),
    "RoAd": ("RoadConfig", {**QUERIES, "group_size": 4}),
    "C3A": ("C3AConfig", {**INNER, "block_size": 8}),
    "HiRA": ("HiraConfig", LOW_RANK),
    "SHiRA": ("ShiraConfig", LOW_RANK),
    "DeLoRA": ("DeloraConfig", LOW_RANK),
    "GraLoRA": ("GraloraConfig", {**LOW_RANK, "gralora_k": 2}),
    "MiSS": ("MissConfig", LOW_RANK),
    "TinyLoRA": ("TinyLoraConfig", {**QUERIES, "r": 2}),
    "Uni-LoRA": ("UniLoraConfig", LOW_RANK),
    "PVeRA, without its noise": ("PveraConfig", {**INNER, "r": 4}),
    "PSOFT": ("PsoftConfig", LOW_RANK),
    "GLoRA": ("GloraConfig", LOW_RANK),
    "Lily": ("LilyConfig", LOW_RANK),
    "OSF": ("OSFConfig", QUERIES),
    "DEFT": ("DeftConfig", LOW_RANK),
    "PEANuT": ("PeanutConfig", LOW_RANK),
    "FRoD": ("FrodConfig", INNER),
    "BEFT": ("BeftConfig", QUERIES),
    "AdaMSS": ("AdamssConfig", LOW_RANK),
    "Supertuning": ("SupertuningConfig", QUERIES),
    "Shadow": ("ShadowConfig", {"task_type": "CAUSAL_LM"}),
    "Trainable tokens": (
        "TrainableTokensConfig",
        {"token_indices": list(range(3, 32)), "target_modules": ["embed_tokens"]},
    ),
    "Prompt tuning": ("PromptTuningConfig", VIRTUAL),
    "Multitask prompt tuning": ("MultitaskPromptTuningConfig", {**VIRTUAL, "num_tasks": 2}),
    "CPT": (
        "CPTConfig",
        {
            "task_type": "CAUSAL_LM",
            "cpt_token_ids": [3, 4, 5],
            "cpt_mask": [1, 1, 1],
            "cpt_tokens_type_mask": [1, 2, 3],
        },
    ),
    "Prefix tuning": ("PrefixTuningConfig", VIRTUAL),
    "P-tuning": ("PromptEncoderConfig", {**VIRTUAL, "encoder_hidden_size": 16}),
    "Cartridge": ("CartridgeConfig", VIRTUAL),
    "Llama-Adapter": ("AdaptionPromptConfig", {"task_type": "CAUSAL_LM", "adapter_len": 3, "adapter_layers": 2}),
    "Poly, without its noise": (
        "PolyConfig",
        {**LOW_RANK, "task_type": "CAUSAL_LM", "n_tasks": 2, "n_skills": 2, "n_splits": 1},
    ),
}


def tasks(rows):
    return {**text(rows), "task_ids": torch.arange(rows) % 2}


BATCHES = {"Multitask prompt tuning": tasks, "Poly, without its noise": tasks}


def base():
    model = make("LlamaForCausalLM", {**GROUPED, "num_key_value_heads": 2})
    model.config.use_cache = False
    return model


def mixed():
    """Returns an X-LoRA model, which mixes saved adapters by trainable weights."""
    import peft

    with tempfile.TemporaryDirectory() as folder:
        for name in ("one", "two"):
            given = {**LOW_RANK, "init_lora_weights": False}
            peft.get_peft_model(base(), peft.LoraConfig(**given)).save_pretrained(f"{folder}/{name}")
        adapters = {"0": f"{folder}/one", "1": f"{folder}/two"}
        config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=16, xlora_depth=1, adapters=adapters)
        model = peft.get_peft_model(base(), config)
    for name, p in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, 0, 0.5)  # so that the adapters differ
    return without_dropout(model)


def adapted(config, arguments):
    import peft

    model = base()
    adapted = peft.get_peft_model(model, getattr(peft, config)(**arguments))
    # Some adapters are initialized to zero, which makes the gradients of their other parameters zero.
    for p in adapted.parameters():
        if p.requires_grad:
            nn.init.normal_(p, p.mean().item(), 0.1)
    without_dropout(adapted)
    for module in adapted.modules():
        if any(name in type(module).__module__ for name in ("pvera", "poly.router")):
            module.training = False  # it draws random numbers, which a loop over samples cannot repeat
    return adapted


def with_biases():
    model = make("BertForSequenceClassification", GROUPED)
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias") or name.startswith("classifier"))
    return model


def rows():
    tuners = [
        Row(
            "Tuners of PEFT",
            name,
            lambda config=config, given=given: adapted(config, given),
            BATCHES.get(name, text),
            "peft",
            dtypes=(torch.float32,) if name == "AdaMSS" else DTYPES,
        )
        for name, (config, given) in TUNERS.items()
    ]
    tuners.append(Row("Tuners of PEFT", "X-LoRA", mixed, text, "peft", dtypes=(torch.float32,)))
    return [*tuners, Row("Tuners of PEFT", "BitFit", with_biases, text, "peft")]
