"""PEFT adapters after private training: saved, loaded without dpengine, merged, and trained further."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpengine import PrivacyEngine
from models import adapters
from models.row import Row, without_dropout
from models.verdict import verdict_of

pytestmark = pytest.mark.nightly
peft = pytest.importorskip("peft")

EXAMPLES, BATCH = 24, 8
LOADED = """
import sys
sys.modules["dpengine"] = None  # importing it raises ImportError
from models.operators import define_operators
define_operators()
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
ids = torch.load(f"{folder}/ids.pt")
adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(f"{folder}/base"), f"{folder}/adapter")
merged = AutoModelForCausalLM.from_pretrained(f"{folder}/merged")
with torch.no_grad():
    torch.save([model.eval()(input_ids=ids).logits for model in (adapted, merged)], f"{folder}/logits.pt")
"""


def tuned(name, base):
    config, options = adapters.TUNERS[name]
    model = without_dropout(peft.get_peft_model(base, getattr(peft, config)(**options)))
    for p in model.parameters():
        if p.requires_grad:
            nn.init.normal_(p, p.mean().item(), 0.1)
    return model


def train(model, words):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    engine = PrivacyEngine(seed=0)
    model, optimizer, loader = engine.make_private(
        model, optimizer, DataLoader(words, batch_size=BATCH), noise_multiplier=0.5, max_grad_norm=1.0
    )
    for ids in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(input_ids=ids).logits[:, :-1].mT, ids[:, 1:]).backward()
        optimizer.step()
    return engine


@pytest.mark.parametrize("detaches", [False, True], ids=["attached", "detached"])
@pytest.mark.parametrize("name", ["LoRA", "DoRA", "IA3", "LoRA, with layers that train"])
def test_saved_and_merged_adapters_give_the_logits_of_the_trained_model(name, detaches, tmp_path):
    torch.manual_seed(0)
    base, words = adapters.base(), adapters.text(EXAMPLES)["input_ids"]
    base.save_pretrained(tmp_path / "base")
    model = tuned(name, base)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library
        engine = train(model, words)
    if detaches:
        engine.detach(model)
    assert any(not torch.equal(before[key], value) for key, value in model.state_dict().items())
    with torch.no_grad():
        expected = model.eval()(input_ids=words).logits
    torch.save(words, tmp_path / "ids.pt")
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=words).logits, expected, rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")

    paths = {"PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", LOADED, str(tmp_path)], check=True, env={**os.environ, **paths})
    for logits in torch.load(tmp_path / "logits.pt"):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_loaded_adapter_can_be_trained_privately(tmp_path):
    torch.manual_seed(0)
    base = adapters.base()
    base.save_pretrained(tmp_path / "base")
    tuned("LoRA", base).save_pretrained(tmp_path / "adapter")

    def loaded():
        again = type(base).from_pretrained(tmp_path / "base")
        again.config.use_cache = False
        return without_dropout(peft.PeftModel.from_pretrained(again, tmp_path / "adapter", is_trainable=True))

    verdict = verdict_of(Row("Tuners of PEFT", "loaded", loaded, adapters.text, "peft"))
    assert verdict.state == "exact", verdict.reason
