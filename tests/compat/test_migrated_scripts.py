"""Scripts written for Opacus: their clipped sums, their privacy cost, and that only imports differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from migrated import FOLDER, ROOT, SCRIPTS, script, text_of, written_for_opacus
from reference import clipped_sum, flat_norms, per_sample_gradients
from torch.utils.data import DataLoader, Subset

from dpengine import PrivacyWarning

ROWS = 24
NAME_AND_MODE = [(name, mode) for name in SCRIPTS for mode in script(name).MODES]

# Output of Opacus 1.6.0 at the end of each script: (epsilon, noise multiplier of the last step), first with --quick.
# Measured with torch 2.13.0 on the CPU; to repeat, with opacus on the path:
#   mkdir there && cp tutorials/from_opacus/*.py there && sed -i 's/dpengine\.compat\.opacus/opacus/' there/*.py
#   for s in there/*_*.py there/schedulers.py; do python $s --quick | tail -1; python $s | tail -1; done
OPACUS = {
    "image_classifier": ((4.995183, 0.602112), (4.999905, 0.953369)),
    "text_lstm": ((3.588561, 0.8), (6.666226, 0.8)),
    "text_transformer": ((7.492943, 0.626831), (7.494029, 0.809326)),
    "limited_memory": ((0.602958, 2.0), (1.131859, 2.0)),
    "schedulers": ((0.854968, 1.8225), (1.009815, 1.076168)),
    "checkpoint_and_resume": ((1.279277, 1.35), (1.444515, 0.984150)),
}


def assert_no_more_than_opacus(name, result, *, quick):
    """Asserts that epsilon, or the calibrated noise, is at most 1 % above that of Opacus.

    It may be lower, because Opacus's accountants return looser upper bounds.
    """
    epsilon, sigma = OPACUS[name][0 if quick else 1]
    assert 0.9 * epsilon < result["epsilon"] <= 1.01 * epsilon
    assert 0.9 * sigma < result["noise_multiplier"] <= 1.01 * sigma


def test_every_script_has_figures_of_opacus():
    assert set(OPACUS) == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_only_imports_differ_from_the_script_for_opacus(name):
    here, there = text_of(name).splitlines(), written_for_opacus(text_of(name)).splitlines()
    changed = [old for old, new in zip(there, here, strict=True) if old != new]
    assert changed
    assert all(line.startswith(("from opacus", "import opacus")) for line in changed)
    assert "dpengine.compat" not in "\n".join(there)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_short_run_has_the_epsilon_of_opacus(name, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = script(name).main(["--quick"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert_no_more_than_opacus(name, result, quick=True)


@pytest.mark.one_in(3, "name")
@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_whole_run_learns_and_has_the_epsilon_of_opacus(name, tmp_path):
    chance_accuracy = {"image_classifier": 0.1, "text_lstm": 1 / 3, "text_transformer": 1 / 3}.get(name, 0.765)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::Warning"}
    command = [sys.executable, "-W", "error", str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []
    result = json.loads(done.stdout.splitlines()[-1])
    assert_no_more_than_opacus(name, result, quick=False)
    assert result["accuracy"] > chance_accuracy + 0.02


def one_step(module, mode, model, criterion, batch, bound):
    """Returns the clipped sums of one step without noise, with the engine that the script imports."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {p: name for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # no noise and fixed batches: not private, on purpose
        private = module.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(batch, batch_size=ROWS),
            criterion=criterion,
            noise_multiplier=0.0,
            max_grad_norm=bound,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
    wrapped, private_optimizer, criterion, loader = (
        private if mode == "ghost" else (*private[:2], criterion, private[2])
    )
    ((inputs, targets),) = loader
    private_optimizer.zero_grad()
    criterion(wrapped(inputs), targets).backward()
    private_optimizer.step()
    assert private_optimizer.expected_batch_size == ROWS
    return {name: p.grad.double() * ROWS for p, name in names.items()}


def assert_sums_of_a_loop(name, mode):
    torch.manual_seed(0)
    module = script(name)
    args = module.parse(["--quick"])
    train, _ = module.load(args)
    model, criterion = module.build(args)
    batch = Subset(train, range(ROWS))
    inputs, targets = (torch.stack(column) for column in zip(*batch, strict=True))
    gradients = per_sample_gradients(model, criterion, (inputs,), targets)
    norms = flat_norms(gradients)
    bound = float(norms.median())
    assert (
        float(norms.min()) < 0.99 * bound < bound < 0.99 * float(norms.max())
    )  # some samples are clipped, and some are not
    truth = clipped_sum(gradients, bound)
    found = one_step(module, mode, model, criterion, batch, bound)
    assert found.keys() == truth.keys()
    scale = torch.cat([total.flatten() for total in truth.values()]).norm()
    for parameter, total in truth.items():
        assert float((found[parameter] - total).norm()) <= 1e-5 * float(scale), parameter


@pytest.mark.slow
@pytest.mark.one_in(2, "name")
@pytest.mark.parametrize("name", SCRIPTS)
def test_clipped_sums_of_a_script_equal_a_loop_over_samples(name):
    assert_sums_of_a_loop(name, "hooks")


@pytest.mark.one_in(2, "name")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [pair for pair in NAME_AND_MODE if pair[1] != "hooks"])
def test_clipped_sums_in_other_modes_equal_a_loop_over_samples(name, mode):
    assert_sums_of_a_loop(name, mode)


def test_chunks_of_a_batch_add_up_to_the_sums_of_a_loop_over_samples():
    torch.manual_seed(0)
    module = script("limited_memory")
    args = module.parse(["--quick", "--max-physical-batch-size", "7", "--width", "16"])
    train, _ = module.load(args)
    model, criterion = module.build(args)
    batch = Subset(train, range(ROWS))
    inputs, targets = (column[:ROWS] for column in train.tensors)
    gradients = per_sample_gradients(model, criterion, (inputs,), targets)
    bound = float(flat_norms(gradients).median())
    truth = clipped_sum(gradients, bound)
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        wrapped, optimizer, loader = module.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(batch, batch_size=ROWS),
            noise_multiplier=0.0,
            max_grad_norm=bound,
            poisson_sampling=False,
        )
    _, chunks = module.train_epoch(args, wrapped, criterion, optimizer, loader)
    assert chunks == 4
    for name, p in model.named_parameters():
        torch.testing.assert_close(ROWS * (before[name] - p.detach().double()), truth[name], rtol=0, atol=1e-5)


def test_texts_are_the_same_each_time_and_balanced():
    documentation = script("documentation")
    (train, test), (again, _) = documentation.load(40), documentation.load(40)
    assert all(torch.equal(one, other) for one, other in zip(train.tensors, again.tensors, strict=True))
    labels = torch.cat([train.tensors[1], test.tensors[1]])
    assert torch.bincount(labels).tolist() == [40, 40, 40]
    assert train.tensors[0].shape == (96, documentation.WORDS)
    assert int(train.tensors[0].max()) < documentation.BUCKETS


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_stored_figures_equal_those_of_the_installed_opacus(name, tmp_path):
    pytest.importorskip("opacus")
    for other in FOLDER.glob("*.py"):
        (tmp_path / other.name).write_text(written_for_opacus(other.read_text(encoding="utf-8")), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-W", "ignore", str(tmp_path / f"{name}.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["epsilon"], result["noise_multiplier"]) == pytest.approx(OPACUS[name][0], rel=1e-3)
