from __future__ import annotations

import numpy as np

from extproc.policy import RoutingPolicy
from extproc.routing.costs import balanced


def test_costs_are_the_weighted_sum_of_the_three_kinds_of_work() -> None:
    policy = RoutingPolicy(uncached_weight=2, pending_prefill_weight=0.5, running_cost_tokens=100)
    costs = balanced(np.array([10, 0, 5]), np.array([0, 40, 2]), np.array([1, 0, 3]), policy)
    assert costs.tolist() == [120.0, 20.0, 311.0]


def test_weights_of_zero_switch_a_term_off() -> None:
    policy = RoutingPolicy(uncached_weight=0, pending_prefill_weight=0, running_cost_tokens=0)
    assert balanced(np.array([9]), np.array([9]), np.array([9]), policy).tolist() == [0.0]
