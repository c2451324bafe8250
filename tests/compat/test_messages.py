"""Messages for scripts that Opacus accepts or rejects with another message, through both interfaces."""

import warnings
from collections import deque

import pytest
import torch
from case_models import Parts
from opacus_runs import assert_same, batch, by_hand, flat, gradients, loss, model, rows, truth
from torch import nn
from torch.utils.data import DataLoader

import dpengine
from dpengine.compat.opacus import GradSampleModule, PrivacyEngine
from dpengine.compat.opacus.accountants.analysis.rdp import compute_rdp
from dpengine.compat.opacus.accountants.utils import get_noise_multiplier
from dpengine.compat.opacus.data_loader import DPDataLoader
from dpengine.compat.opacus.schedulers import ExponentialNoise
from dpengine.compat.opacus.utils.uniform_sampler import UniformWithReplacementSampler
from dpengine.errors import (
    AccountingRefusedError,
    BatchMismatchError,
    BatchStateError,
    MissingGradientError,
    PrivacyWarning,
    SamplingError,
    UnsupportedLayerError,
    forget_notices,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")


def engine_parts(module=None, **more):
    """Returns a model, an optimizer and a loader that ``dpengine.PrivacyEngine`` made private."""
    module = module or model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = DataLoader(rows(24), 8)
    return dpengine.PrivacyEngine(seed=1).make_private(module, optimizer, loader, noise_multiplier=1.0, **more)


def compat_parts(module=None, *, seed=1, **more):
    module = module or model()
    repeats = {
        "noise_generator": torch.Generator().manual_seed(seed)
    }  # the generator of the loader makes batches repeatable, too
    more = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | repeats | more
    made = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(rows(24), 8, generator=torch.Generator().manual_seed(seed)),
        **more,
    )
    return made[0], made[1], made[-1]


both_interfaces = pytest.mark.parametrize("make_parts", [engine_parts, compat_parts])


def step(wrapped, optimizer, inputs, targets):
    optimizer.zero_grad()
    loss(wrapped, inputs, targets).backward()
    optimizer.step()


def fetching_ahead(loader, count):
    waiting = deque()
    for one in loader:
        waiting.append(one)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


@pytest.mark.parametrize(
    "wrap", [list, lambda loader: fetching_ahead(loader, 1), lambda loader: fetching_ahead(loader, 2)]
)
@both_interfaces
def test_batches_that_were_fetched_ahead_are_named_as_such(make_parts, wrap):
    wrapped, optimizer, loader = make_parts()
    before = flat(wrapped.state_dict())
    with pytest.raises(BatchMismatchError, match=r"fetched ahead.*do not call list\(loader\).*num_workers"):
        for inputs, targets in wrap(loader):
            before = flat(wrapped.state_dict())
            step(wrapped, optimizer, inputs, targets)
    assert torch.equal(flat(wrapped.state_dict()), before)


def test_chunks_that_were_fetched_ahead_are_named_as_such():
    module, optimizer, loader = engine_parts(physical_batch_size=3)
    with pytest.raises(BatchStateError, match=r"fetches ahead.*do not call list\(loader\)"):
        for inputs, targets in list(loader):
            step(module, optimizer, inputs, targets)


OTHER_NUMBERS_OF_SAMPLES = {
    "filtered": (lambda x: x[torch.arange(len(x)) > 0], r"x\[mask\].*\(losses \* mask\)\.mean\(\)"),
    "doubled": (lambda x: torch.cat([x, x]), r"duplicated or merged.*several views"),
}


@pytest.mark.parametrize(("change", "message"), OTHER_NUMBERS_OF_SAMPLES.values(), ids=OTHER_NUMBERS_OF_SAMPLES)
@both_interfaces
def test_samples_that_were_filtered_or_doubled_are_named_as_such(make_parts, change, message):
    wrapped, optimizer, loader = make_parts()
    with pytest.raises(BatchMismatchError, match=message):
        for inputs, targets in loader:
            step(wrapped, optimizer, change(inputs), change(targets))


@both_interfaces
def test_a_batch_of_another_models_loader_is_named_as_such(make_parts):
    other = make_parts()[2]
    wrapped, optimizer, _ = make_parts(model(1))
    with pytest.raises(BatchStateError, match=r"private loader of this model.*has its own loader"):
        step(wrapped, optimizer, *next(iter(other)))


def test_a_loader_that_is_private_already_is_named_as_such():
    loader = engine_parts()[2]
    module = model(1)
    with pytest.raises(SamplingError, match=r"private already.*plain loader"):
        dpengine.PrivacyEngine().make_private(
            module, torch.optim.SGD(module.parameters(), lr=0.1), loader, noise_multiplier=1.0
        )


@both_interfaces
def test_the_error_for_a_penalty_on_weights_suggests_weight_decay(make_parts):
    wrapped, optimizer, loader = make_parts()
    with pytest.raises(MissingGradientError, match=r"penalty on weights.*weight_decay="):
        for inputs, targets in loader:
            penalty = sum(p.square().sum() for p in wrapped.parameters())
            (loss(wrapped, inputs, targets) + 0.1 * penalty).backward()
            optimizer.step()


@both_interfaces
def test_the_error_for_data_parallel_suggests_one_process_for_each_device(make_parts):
    with pytest.raises(UnsupportedLayerError, match=r"DataParallel.*DistributedDataParallel.*torchrun"):
        make_parts(nn.DataParallel(model()))


NOISE_FOR = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1}
MISSPELLED = [
    ("get_epsilon", lambda: PrivacyEngine().get_epsilon(dleta=1e-5), "delta"),
    ("from_data_loader", lambda: DPDataLoader.from_data_loader(DataLoader(rows(), 4), distribted=True), "distributed"),
    ("get_noise_multiplier", lambda: get_noise_multiplier(**NOISE_FOR, epoch=3), "epochs"),
    ("get_noise_multiplier", lambda: get_noise_multiplier(**NOISE_FOR, epsilon_tolerence=0.1), "epsilon_tolerance"),
    ("PrivacyEngine.__init__", lambda: PrivacyEngine(acountant="rdp"), "accountant"),
    ("DPDataLoader", lambda: DPDataLoader(range(4), sample_rate=0.5, batch_frist=True), "batch_first"),
    ("GradSampleModule.__init__", lambda: GradSampleModule(model(), batch_frist=True), "batch_first"),
    ("DPOptimizer", lambda: by_hand(noise_multipler=1.0), "noise_multiplier"),
    ("ExponentialNoise", lambda: ExponentialNoise(by_hand()[1], gama=0.5), "gamma"),
    ("UniformWithReplacementSampler", lambda: UniformWithReplacementSampler(samplerate=0.1), "sample_rate"),
    ("compute_rdp", lambda: compute_rdp(q=0.1, noise_multiplyer=1.0, steps=1, orders=2.0), "noise_multiplier"),
]


@pytest.mark.parametrize(("called", "call", "meant"), MISSPELLED)
@pytest.mark.hazard("O34")
def test_a_misspelled_keyword_raises_an_error_that_names_the_nearest(called, call, meant):
    with pytest.raises(TypeError, match=rf"{called}\(\) has no argument .* Did you mean '{meant}'"):
        call()


# Other methods than forward


class EncoderModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def encode(self, inputs):
        return self.first(inputs).tanh()

    def forward(self, inputs):
        return self.last(self.encode(inputs))


OTHER_MODES = ["hooks", "functorch", "ew", "ghost"]


@pytest.mark.parametrize("mode", OTHER_MODES)
def test_a_backward_pass_through_another_method_is_named_at_the_step(mode):
    wrapped, optimizer, loader = compat_parts(EncoderModel(), grad_sample_mode=mode)
    wrapped.encode(next(iter(loader))[0]).square().mean().backward()
    with pytest.raises(BatchStateError, match=r"'first'.*model\.encode\(x\).*forward may choose"):
        optimizer.step()


@pytest.mark.one_in(4, "mode", "stepped", others="slow")
@pytest.mark.parametrize("mode", OTHER_MODES)
@pytest.mark.parametrize("stepped", [False, True])
def test_samples_of_another_method_do_not_add_to_the_next_batch(mode, stepped):
    wrapped, optimizer, loader = compat_parts(
        EncoderModel(), grad_sample_mode=mode, noise_multiplier=0.0, poisson_sampling=False
    )
    batches = iter(loader)
    wrapped.encode(next(batches)[0]).square().mean().backward()
    if stepped:
        with pytest.raises(BatchStateError):
            optimizer.step()
    inputs, targets = next(batches)
    expected = truth(wrapped._module, inputs, targets)
    loss(wrapped, inputs, targets).backward()
    optimizer.step()
    assert_same(gradients(wrapped._module, 8), expected)


@pytest.mark.parametrize("cleared", [False, True])
def test_samples_of_another_method_do_not_add_to_the_next_batch_by_hand(cleared):
    wrapped, optimizer = by_hand(EncoderModel())
    wrapped.encode(batch()[0] + 1).square().mean().backward()
    if not cleared:
        with pytest.raises(BatchStateError, match="was not called by the model"):
            wrapped(batch()[0])
    optimizer.zero_grad()
    expected = truth(wrapped._module, *batch())
    loss(wrapped, *batch()).backward()
    optimizer.step()
    assert_same(gradients(wrapped._module, 4), expected)


# Messages of the engine that need more detail in compat


def test_the_error_for_an_unused_parameter_names_the_engine_that_allows_it():
    idle = Parts(lambda m, inputs: m.used(inputs), used=model(), idle=nn.Linear(2, 2))
    wrapped, optimizer, loader = compat_parts(idle)
    with pytest.raises(MissingGradientError, match=r"idle.*unused_parameters='zero' to dpengine\.PrivacyEngine"):
        step(wrapped, optimizer, *next(iter(loader)))


def test_per_parameter_thresholds_must_be_assigned_again_after_one_was_frozen():
    module = model()
    wrapped, optimizer, loader = compat_parts(module, clipping="per_layer", max_grad_norm=1.0)
    frozen = next(module.parameters())
    frozen.requires_grad_(False)
    inputs, targets = next(iter(loader))
    with pytest.raises(ValueError, match=r"optimizer\.max_grad_norms = \["):
        step(wrapped, optimizer, inputs, targets)
    optimizer.max_grad_norms = [0.5 for p in module.parameters() if p.requires_grad]
    for inputs, targets in loader:
        step(wrapped, optimizer, inputs, targets)
    assert frozen.grad is None


@pytest.mark.parametrize(
    "setting",
    [
        {"clipbound_learning_rate": 0},
        {"clipbound_learning_rate": "0.2"},
        {"min_clipbound": 0.0},
        {"min_clipbound": torch.tensor(1.0)},
        {"max_clipbound": 10**400},
        {"unclipped_num_std": float("inf")},
        {"target_unclipped_quantile": 1.0},
    ],
)
def test_invalid_settings_of_adaptive_clipping_are_rejected_by_name(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))}=.*must be a number above 0 and (finite|below 1)"):
        compat_parts(clipping="adaptive", **setting)


def test_a_setting_of_adaptive_clipping_that_is_rejected_changes_nothing():
    _, optimizer, _ = compat_parts(clipping="adaptive")
    with pytest.raises(ValueError, match="clipbound_learning_rate=-1"):
        optimizer.clipbound_learning_rate = -1
    with pytest.raises(ValueError, match="max_clipbound=100"):
        optimizer.max_clipbound = 10**400
    with pytest.raises(ValueError, match="max_clipbound=1e-07 must be above min_clipbound=1e-06"):
        optimizer.max_clipbound = 1e-7
    assert (optimizer.clipbound_learning_rate, optimizer.max_clipbound) == (0.2, 1e6)
    optimizer.max_clipbound = 5.0


def test_merged_batches_of_one_pass_do_not_warn():
    forget_notices()
    wrapped, optimizer, loader = compat_parts(poisson_sampling=False)
    batches = iter(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        for skipped in (True, False):
            optimizer.signal_skip_step(skipped)
            loss(wrapped, *next(batches)).backward()
            optimizer.step()


def test_the_error_for_a_step_without_hooks_and_gradients_names_grad_sample():
    wrapped, optimizer, loader = compat_parts(grad_sample_mode="no_op")
    with pytest.raises(
        BatchStateError, match=r"no p\.grad_sample was written.*write p\.grad_sample of every parameter"
    ):
        step(wrapped, optimizer, *next(iter(loader)))


def test_the_error_without_poisson_sampling_has_whole_sentences():
    module, engine = model(), dpengine.PrivacyEngine(seed=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    parts = engine.make_private(module, optimizer, DataLoader(rows(24), 8), noise_multiplier=1.0, sampling="shuffle")
    step(*parts[:2], *next(iter(parts[2])))
    with pytest.raises(AccountingRefusedError, match=r"does not draw Poisson batches\. Use Poisson sampling for"):
        engine.get_epsilon(1e-5)
