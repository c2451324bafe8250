"""Extensions built only from the recipes of docs/extending.md."""

import numpy as np
import pytest
import torch
from launch import launched
from recipes import NAMES, STEPS, begun, code_of, of_rank, train, weights_after

from dpengine import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")
every_recipe = pytest.mark.parametrize("name", NAMES)
IN_REPORT = {
    "Soft": "clipping Soft",
    "Decaying": "correlated noise Decaying, which is not dpengine's",
    "Bernoulli": "The sampling scheme Bernoulli draws batches as it states",
    "FewOrders": "computed by RDP of orders 2 to 32, not verified",
    "Scale": "clipping flat",
}


@every_recipe
def test_a_recipe_has_at_most_25_lines(name):
    assert code_of(name).count("\n") <= 25


@pytest.mark.one_in(2, "name", others="slow")
@every_recipe
def test_extension_meets_the_target_and_is_named_in_the_report(name):
    engine, model, optimizer, loader = begun(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, optimizer, loader, STEPS)
    assert 2.7 < engine.epsilon <= 3.0
    assert all(not torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert IN_REPORT[name] in " ".join(str(engine.report()).split())


@pytest.mark.one_in(2, "name", others="slow")
@every_recipe
def test_resumed_run_equals_an_uninterrupted_run(name, tmp_path):
    expected, epsilon = weights_after(name)
    engine, model, optimizer, loader = begun(name)
    train(model, optimizer, loader, 5)
    checkpoint.save(tmp_path / "saved", engine)
    engine, model, optimizer, loader = begun(name)
    checkpoint.load(tmp_path / "saved", engine, nothing_released_since=True)
    train(model, optimizer, loader, STEPS - 5)
    assert engine.epsilon == epsilon
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_two_processes_give_the_weights_of_one():
    found = launched(2, of_rank)
    assert all(isinstance(one, list) for one in found), found
    for place, name in enumerate(NAMES):
        expected, epsilon = weights_after(name)
        for rank in found:
            weights, of_rank_epsilon = rank[place]
            assert of_rank_epsilon == epsilon, name
            for key, value in weights.items():
                torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")


def test_recipe_noise_matches_its_strategy_matrix():
    """Recovers the noise as the difference of two runs of one seed that differ only in the noise."""
    released = {}
    for sigma in (1e-9, 1.0):
        _, model, optimizer, loader = begun("Decaying", noise_multiplier=sigma, max_grad_norm=1.0)
        optimizer.param_groups[0]["lr"] = 0.0
        rows = []
        while len(rows) < STEPS:
            for inputs, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
        released[sigma] = torch.stack(rows[:STEPS])
    noise = (released[1.0] - released[1e-9]).numpy() * 12
    strategy = np.eye(STEPS)
    for t in range(STEPS):  # z_t = x_t + share * sum over earlier steps s of decay**(t-1-s) x_s
        for s in range(t):
            strategy[t, s] = 0.05 * 0.9 ** (t - 1 - s)
    fresh = strategy @ noise / np.linalg.norm(strategy, axis=0).max()
    assert fresh.std() == pytest.approx(1.0, rel=0.05)
    correlations = np.corrcoef(fresh) - np.eye(STEPS)
    assert np.abs(correlations).max() < 5 / np.sqrt(fresh.shape[1])
