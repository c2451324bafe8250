"""Models of transformers that no layer rule covers, in modes ``whole_model`` and ``auto``."""

import copy
import re
import warnings

import pytest
import torch
from reference import clipped_sum, flat_norms, per_sample_gradients
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpengine import Flat, PerSampleGradientClipper
from dpengine.errors import BatchDependentLossError

pytestmark = pytest.mark.nightly
transformers = pytest.importorskip("transformers")

WORDS, LENGTH, SAMPLES = 32, 6, 4
WEIGHTS = torch.linspace(1, 4, SAMPLES)
TOKENS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
SEQ2SEQ = {
    **TOKENS,
    **HEADS,
    "d_model": 16,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 16,
}
T5 = {**TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
DECODER = {**TOKENS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
EXPERTS = {**DECODER, "num_key_value_heads": 1, "num_experts_per_tok": 2}
IMAGES = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}


def words():
    return torch.randint(3, WORDS, (SAMPLES, LENGTH))


def one_text():
    return {"input_ids": words()}


def two_texts():
    mask = torch.ones(SAMPLES, LENGTH, dtype=torch.long)
    mask[1, 4:] = 0
    return {"input_ids": words(), "attention_mask": mask, "decoder_input_ids": words()}


def image():
    return {"pixel_values": torch.randn(SAMPLES, 3, 16, 16)}


def image_with_noise():
    return {**image(), "noise": torch.rand(SAMPLES, 4)}


DECODER_OF_IMAGES = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 24,
}
IMAGE_SIDE = {"image_size": 16, "patch_size": 8}
MAMBA = {**TOKENS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
ATTENTION = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
XLNET = {"vocab_size": WORDS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}

MODELS = {
    "T5ForConditionalGeneration": (T5, two_texts),
    "MT5ForConditionalGeneration": (T5, two_texts),
    "BartForConditionalGeneration": (SEQ2SEQ, two_texts),
    "MarianMTModel": (SEQ2SEQ, two_texts),
    "OPTForCausalLM": ({**DECODER, "ffn_dim": 24, "word_embed_proj_dim": 16}, one_text),
    "MPNetForMaskedLM": (DECODER, one_text),
    "MixtralForCausalLM": ({**EXPERTS, "num_local_experts": 3}, one_text),
    "Qwen3MoeForCausalLM": ({**EXPERTS, "num_experts": 3, "moe_intermediate_size": 8, "head_dim": 8}, one_text),
    "SwinForImageClassification": (IMAGES, image),
    "Swinv2ForImageClassification": (IMAGES, image),
    "BeitForImageClassification": ({**DECODER, **IMAGE_SIDE, "use_relative_position_bias": True}, image),
    "ViTMAEForPreTraining": ({**DECODER, **IMAGE_SIDE, **DECODER_OF_IMAGES}, image_with_noise),
    "CLIPVisionModelWithProjection": ({**DECODER, **IMAGE_SIDE, "projection_dim": 8}, image),
    "DebertaForMaskedLM": ({**DECODER, **ATTENTION}, one_text),
    "DebertaV2ForMaskedLM": ({**DECODER, **ATTENTION}, one_text),
    "LongformerForMaskedLM": ({**DECODER, "attention_window": 4, "max_position_embeddings": 16}, one_text),
    "MambaForCausalLM": (MAMBA, one_text),
    "Mamba2ForCausalLM": ({**MAMBA, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}, one_text),
    "XLNetLMHeadModel": (XLNET, one_text),
}


# Modules that the default mode runs sample by sample
UNITS = {
    "BartForConditionalGeneration": ["model.decoder"],
    "MarianMTModel": ["model.decoder", "model.encoder"],
    "OPTForCausalLM": ["model.decoder"],
    "MixtralForCausalLM": ["model.layers.0.mlp", "model.layers.1.mlp"],
    "Qwen3MoeForCausalLM": ["model.layers.0.mlp", "model.layers.1.mlp"],
    "SwinForImageClassification": ["swin.encoder.layers.0.blocks.0", "swin.encoder.layers.1.blocks.0.attention"],
    "Swinv2ForImageClassification": [
        "swinv2.encoder.layers.0.blocks.0",
        "swinv2.encoder.layers.1.blocks.0.attention.self",
    ],
    "BeitForImageClassification": ["beit.layers.0", "beit.layers.1"],
    "ViTMAEForPreTraining": ["decoder", "vit.embeddings"],
    "CLIPVisionModelWithProjection": ["vision_model.embeddings"],
    "DebertaForMaskedLM": ["deberta.encoder"],
    "DebertaV2ForMaskedLM": ["deberta.encoder"],
    "LongformerForMaskedLM": [
        "longformer.encoder.layer.0.attention.self",
        "longformer.encoder.layer.1.attention.self",
    ],
    "MambaForCausalLM": ["backbone.layers.0.mixer", "backbone.layers.1.mixer"],
    "Mamba2ForCausalLM": ["backbone.layers.0.mixer", "backbone.layers.1.mixer"],
    "XLNetLMHeadModel": [""],
}


def make_model(name, dropout=0.0):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    sizes, inputs_of = MODELS[name]
    config = kind.config_class(**sizes)
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, dropout)
    model = kind(config).train()
    return model, inputs_of


def loss_of(outputs, weights):
    (output,) = [outputs[key] for key in ("logits", "image_embeds") if key in outputs]
    return (output.flatten(1).sin().mean(1) * weights).sum()


def reference_copy(model):
    """Returns a copy for the loop over samples, which runs in double; the default expert kernel does not support it."""
    plain = copy.deepcopy(model)
    if getattr(plain.config, "num_experts_per_tok", None):
        plain.set_experts_implementation("eager")
    return plain


def assert_clipped(model, max_norm, gradients):
    truth = clipped_sum(gradients, max_norm)
    found = torch.cat([model.get_parameter(key).grad.flatten() for key in truth])
    expected = torch.cat([total.flatten() for total in truth.values()])
    assert (found - expected).norm() < 1e-4 * expected.norm()


def compare_steps(model, inputs_of, loss_of, gradients_of, reduction="sum", mode="whole_model"):
    """Compares two steps with the gradients of ``gradients_of``, after one step that sets the clipping norm."""
    clipped = None
    for _ in range(3):
        inputs = inputs_of()
        model.zero_grad()
        state = torch.get_rng_state()
        loss = loss_of(model(**inputs), WEIGHTS)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        gradients = gradients_of(model, inputs)
        torch.set_rng_state(after)
        if clipped is None:
            max_norm = flat_norms(gradients).median().item()
            clipped = PerSampleGradientClipper(model, Flat(max_norm), loss_reduction=reduction, grad_sample_mode=mode)
            continue
        loss.backward()
        clipped.clip_and_accumulate()
        clipped.pre_step()
        parts = SAMPLES if reduction == "mean" else 1
        assert_clipped(model, max_norm / parts, [{k: g / parts for k, g in row.items()} for row in gradients])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_clipped_as_by_a_loop_over_samples(name):
    model, inputs_of = make_model(name)
    compare_steps(
        model, inputs_of, loss_of, lambda m, inputs: per_sample_gradients(reference_copy(m), loss_of, inputs, WEIGHTS)
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_exact_in_the_default_mode_and_its_smallest_parts_run_each_sample_alone(name):
    model, inputs_of = make_model(name)
    gradients_of = lambda m, inputs: per_sample_gradients(reference_copy(m), loss_of, inputs, WEIGHTS)  # noqa: E731
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        compare_steps(model, inputs_of, loss_of, gradients_of, mode="auto")
    texts = [str(one.message) for one in seen if "[DPE028]" in str(one.message)]
    units = [re.search(r"through (?:'(.*?)'|the model) \(", text).group(1) or "" for text in texts]
    assert sorted(units) == UNITS.get(name, [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["auto", "whole_model"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["OPTForCausalLM", "BartForConditionalGeneration", "MixtralForCausalLM"])
def test_gradient_checkpointing_does_not_change_the_clipped_sum(name, use_reentrant, mode):
    model, inputs_of = make_model(name)
    plain = copy.deepcopy(model)  # a loop over samples cannot run reentrant checkpoints
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()

    def gradients_of(trained, inputs):
        plain.load_state_dict(trained.state_dict())
        return per_sample_gradients(reference_copy(plain), loss_of, inputs, WEIGHTS)

    compare_steps(model, inputs_of, loss_of, gradients_of, mode=mode)


@pytest.mark.parametrize(
    ("name", "one_by_one"),  # `vmap` cannot run models whose control flow depends on their masks
    [
        ("T5ForConditionalGeneration", True),
        ("BartForConditionalGeneration", True),
        ("DebertaForMaskedLM", True),
        ("SwinForImageClassification", False),
    ],
)
def test_a_model_with_dropout_is_clipped_as_by_torch_func(name, one_by_one):
    model, inputs_of = make_model(name, dropout=0.1)
    plain = copy.deepcopy(model)

    def gradients_of(trained, inputs):
        parameters = {key: p.detach() for key, p in trained.named_parameters()}

        def loss_of_one(parameters, row, weight):
            row = {key: value.unsqueeze(0) for key, value in row.items()}
            return loss_of(functional_call(plain, parameters, (), row), weight)

        with sdpa_kernel(SDPBackend.MATH):
            if one_by_one:
                rows = [{key: value[i] for key, value in inputs.items()} for i in range(SAMPLES)]
                return [grad(loss_of_one)(parameters, row, w) for row, w in zip(rows, WEIGHTS, strict=True)]
            found = vmap(grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")(parameters, inputs, WEIGHTS)
        return [{key: rows[i] for key, rows in found.items()} for i in range(SAMPLES)]

    compare_steps(model, inputs_of, loss_of, gradients_of)


def own_loss(outputs, _):
    return outputs.loss


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "OPTForCausalLM"])
def test_the_loss_that_a_model_computes_is_that_of_single_samples(name):
    model, inputs_of = make_model(name)
    batch = lambda: {**inputs_of(), "labels": words()}  # noqa: E731
    gradients_of = lambda m, inputs: per_sample_gradients(reference_copy(m), own_loss, inputs, WEIGHTS)  # noqa: E731
    compare_steps(model, batch, own_loss, gradients_of, reduction="mean")


def test_a_loss_over_the_tokens_of_a_batch_is_rejected_and_the_message_names_one_that_trains():
    model, inputs_of = make_model("T5ForConditionalGeneration")
    labels = words()
    labels[0, 3:] = -100
    PerSampleGradientClipper(model, Flat(1.0), grad_sample_mode="whole_model")
    with pytest.raises(BatchDependentLossError, match="neither the mean nor the sum") as seen:
        model(**inputs_of(), labels=labels)
    named = re.search(r"(dpengine\.losses\.\w+\(.*?\)), after (import [\w.]+)\.", str(seen.value))
    scope = {}
    exec(named.group(2), scope)
    loss = eval(named.group(1), scope | {"logits": model(**inputs_of()).logits, "labels": labels})
    loss.backward()
