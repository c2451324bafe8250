"""Mistakes that are in both the error catalogue and the table of bad arguments."""

from torch import nn

from dpengine import PrivacyEngine

UNREACHABLE_BUDGET = {"target_epsilon": 1e-9, "target_delta": 1e-9, "steps": 9}


def batch_norm_model():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def rdp_engine():
    return PrivacyEngine(accountant="rdp")  # the accountant that fails fastest
