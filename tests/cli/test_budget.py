"""``calibrate`` and ``epsilon`` print full statements with the numbers of the reference table."""

import json
import re

import pytest

from dpengine.cli.main import main

ADULT = ["--n", "32561", "--batch", "1024", "--epochs", "15", "--delta", "1e-5"]
FASHION = ["--n", "60000", "--batch", "2048", "--steps", "600", "--delta", "1e-5"]


def printed(capsys, *argv):
    assert main(list(argv)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "sigma"), [("0.5", 4.978), ("1", 2.738), ("3", 1.236)])
def test_calibrate_finds_the_reference_noise(capsys, epsilon, sigma):
    # Reference: a PLD search at a coarser grid, so it may be a little larger.
    found = json.loads(printed(capsys, "calibrate", "--epsilon", epsilon, *ADULT, "--json"))
    assert found["noise_multiplier"] == pytest.approx(sigma, rel=2e-3)
    assert found["epsilon"] <= float(epsilon)
    assert found["steps"] == 480  # ceil(32561 / 1024) = 32 batches an epoch


def test_epsilon_finds_the_reference_numbers(capsys):
    found = json.loads(printed(capsys, "epsilon", "--sigma", "2.15", *FASHION, "--json"))
    assert found["epsilon"] == pytest.approx(1.664, rel=2e-3)
    assert found["mu_gdp"] == pytest.approx(0.433, rel=0.05)
    assert found["advantage"] == pytest.approx(0.162, rel=5e-3)


@pytest.mark.slow
def test_epsilon_undoes_calibrate(capsys):
    found = json.loads(printed(capsys, "calibrate", "--epsilon", "2", *FASHION, "--json"))
    back = json.loads(printed(capsys, "epsilon", "--sigma", repr(found["noise_multiplier"]), *FASHION, "--json"))
    assert back["epsilon"] == pytest.approx(found["epsilon"], rel=1e-9)


@pytest.mark.one_in(2, "argv", others="slow")
@pytest.mark.parametrize("argv", [["calibrate", "--epsilon", "3", *ADULT], ["epsilon", "--sigma", "1.236", *ADULT]])
def test_what_is_printed_is_a_statement_and_not_a_bare_number(capsys, argv):
    out = printed(capsys, *argv, "--full")
    for needed in ("zero-out", "δ = 1e-05", "Unit:", "Not covered:", "'pld' of dpengine"):
        assert needed in out
    statement = json.loads(printed(capsys, *argv, "--json"))["statement"]
    assert statement in out


@pytest.mark.slow
def test_the_printed_noise_meets_the_target(capsys):
    sigma = re.match(r"noise_multiplier = (\S+) \(ε = 1.00, ", printed(capsys, "calibrate", "--epsilon", "1", *ADULT))[
        1
    ]
    full = printed(capsys, "calibrate", "--epsilon", "1", *ADULT, "--full")
    assert full.startswith(f"noise_multiplier = {sigma}\n")
    again = json.loads(printed(capsys, "epsilon", "--sigma", sigma, *ADULT, "--json"))
    assert again["epsilon"] <= 1


@pytest.mark.parametrize("rows", ["6e4", "60000.0", "6.0E+4", " 60_000"])
def test_a_count_may_have_an_exponent(capsys, rows):
    options = "--batch 2.048e3 --steps 6e2 --delta 1e-5".split()
    same = printed(capsys, "epsilon", "--sigma", "2.15", *FASHION)
    assert printed(capsys, "epsilon", "--sigma", "2.15", "--n", rows, *options) == same


@pytest.mark.slow
def test_delta_defaults_to_a_value_from_the_number_of_examples(capsys):
    found = json.loads(printed(capsys, "epsilon", "--sigma", "1", *"--n 60000 --batch 256 --steps 10 --json".split()))
    assert found["delta"] == pytest.approx(60000**-1.1)


def test_no_noise_is_stated_to_be_not_private(capsys):
    out = printed(capsys, "epsilon", "--sigma", "0", *ADULT)
    assert "ε = ∞" in out
    assert "NOT PRIVATE" in out


def test_another_accountant_is_named(capsys):
    found = json.loads(printed(capsys, "epsilon", "--sigma", "2.15", *FASHION, "--accountant", "rdp", "--json"))
    assert found["accountant"] == "rdp"
    assert found["epsilon"] > 1.664  # its bound is looser


RUN = ["epsilon", "--sigma", "1.1", "--n", "60000", "--batch", "2048", "--steps", "600"]
CONSTANTS = {"--sample-rate": ["--sample-rate", "0.03"], "--delta": ["--delta", "1e-6"]}


@pytest.mark.slow
@pytest.mark.parametrize("given", [[], ["--delta"], ["--sample-rate"]], ids=str)
def test_values_derived_from_the_number_of_examples_make_it_public(capsys, given):
    argv = [*RUN, *(word for name in given for word in CONSTANTS[name])]
    assert ", zero-out, " in printed(capsys, *argv)
    out = printed(capsys, *argv, "--full")
    assert "(zero-out)" in out and "public (60,000)" in out and "add-or-remove-one" not in out
    assert json.loads(printed(capsys, *argv, "--json"))["adjacency"] == "zero-out"


def test_constants_keep_the_number_of_examples_private(capsys):
    argv = [*RUN, *CONSTANTS["--sample-rate"], *CONSTANTS["--delta"]]
    assert ", add-or-remove-one, " in printed(capsys, *argv)
    out = printed(capsys, *argv, "--full")
    assert "add-or-remove-one" in out and "rate 0.03," in out and "60,000" not in out
    found = json.loads(printed(capsys, *argv, "--json"))
    assert (found["adjacency"], found["sample_rate"]) == ("add-or-remove-one", 0.03)


def test_a_rate_without_the_number_of_steps_is_a_usage_error(capsys):
    argv = ["epsilon", *"--sigma 1 --n 600 --batch 20 --epochs 2 --sample-rate 0.03".split()]
    assert main(argv) == 2
    assert "--steps" in capsys.readouterr().err


@pytest.mark.one_in(2, "argv", others="slow")
@pytest.mark.parametrize("argv", [RUN, ["calibrate", "--epsilon", "3", *RUN[3:]]], ids=["epsilon", "calibrate"])
def test_output_does_not_claim_that_a_run_took_place(capsys, argv):
    assert printed(capsys, *argv).count("\n") == 1
    out = printed(capsys, *argv, "--full")
    assert "Steps: 600 would be charged." in out
    for claimed in ("steps charged", "planned", "in memory", "of the ledger", "[yes]", "[no]", "was not probed"):
        assert claimed not in out
    assert "The loss of a row depends on that row alone." in " ".join(out.split())


SHORT = ["epsilon", "--sigma", "1", "--n", "1000", "--batch", "10", "--steps", "5", "--delta", "1e-5"]

EXACT = ["--sample-rate", "1", "--accountant", "gdp"]  # a closed form, and quick


def test_epsilon_accepts_a_relation(capsys):
    found = {
        name: json.loads(printed(capsys, *SHORT, *EXACT, "--relation", name, "--json"))
        for name in ("add-remove", "zero-out", "replace-one")
    }
    assert [one["adjacency"] for one in found.values()] == ["add-or-remove-one", "zero-out", "replace-one"]
    assert found["add-remove"]["epsilon"] == found["zero-out"]["epsilon"] < found["replace-one"]["epsilon"]
    assert "1,000" in found["zero-out"]["statement"] and "1,000" not in found["add-remove"]["statement"]
    assert "differ in one training example" in " ".join(found["replace-one"]["statement"].split())


def test_calibrate_accepts_a_relation(capsys):
    rest = [*SHORT[3:], *EXACT, "--json"]
    sigma = [
        json.loads(printed(capsys, "calibrate", "--epsilon", "1", *rest, "--relation", name))["noise_multiplier"]
        for name in ("zero-out", "replace-one")
    ]
    assert sigma[1] == pytest.approx(2 * sigma[0], rel=1e-4)  # replacing an example has twice the sensitivity


def test_add_remove_is_rejected_if_a_value_is_derived_from_the_number_of_examples(capsys):
    assert main([*SHORT, "--relation", "add-remove"]) == 2
    assert "--sample-rate" in capsys.readouterr().err


@pytest.mark.slow
def test_json_has_bounds_from_both_sides_where_the_accountant_has_them(capsys):
    found = json.loads(printed(capsys, *SHORT, "--steps", "1", "--json"))
    bounds = found["bounds"]
    assert bounds["lower"] <= bounds["estimate"] <= bounds["upper"] == found["epsilon"]
    assert bounds["upper"] < 1.01 * bounds["lower"]
    assert json.loads(printed(capsys, *SHORT, *EXACT, "--accountant", "rdp", "--json"))["bounds"] is None
    infinite = json.loads(printed(capsys, *SHORT, "--sigma", "0", "--json"))["bounds"]
    assert set(infinite.values()) == {"inf"}


@pytest.mark.parametrize("sigma", ["1e-200", "1e-320"])
def test_almost_no_noise_is_stated_to_be_not_private(capsys, sigma):
    first = printed(capsys, *SHORT, "--sigma", sigma, "--full").split("\n\n")[1].splitlines()[0]
    for line in (first, printed(capsys, *SHORT, "--sigma", sigma)):
        assert "ε = ∞" in line and "[NOT PRIVATE]" in line
    assert "[NOT PRIVATE]" in json.loads(printed(capsys, *SHORT, "--sigma", sigma, "--json"))["statement"]


@pytest.mark.parametrize("sigma", ["1e16", "1e300", "1.7e308"])
def test_enormous_noise_has_epsilon_zero(capsys, sigma):
    assert printed(capsys, *SHORT, "--sigma", sigma).startswith("ε = 0.00 (δ = 1e-05, 5 steps, ")
    out = printed(capsys, *SHORT, "--sigma", sigma, "--full")
    assert "(ε = 0.00, δ = 1e-05)" in out and f"{float(sigma):.6g}" in out
    assert json.loads(printed(capsys, *SHORT, "--sigma", sigma, "--json"))["epsilon"] == 0


@pytest.mark.slow
def test_the_largest_number_of_steps_has_an_epsilon(capsys):
    out = printed(capsys, *SHORT, "--steps", str(2**62), "--full")
    assert f"Steps: {2**62:,} would be charged." in out
    assert float(re.search(r"\(ε = ([\d.]+), ", out)[1]) > 2**62 * 0.01**2  # the mean of the losses is about that
