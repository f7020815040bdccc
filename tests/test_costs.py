"""Load or compute: the plan must be the quicker one, by what was measured, and speeds be learnt."""

from itertools import combinations

import pytest

from mpic_rag.store.costs import Costs, Load

MODEL = "model"


@pytest.fixture
def costs():
    costs = Costs()
    costs.pass_s[MODEL] = 0.0
    costs.token_s[MODEL] = 1e-3
    costs.tiers["disk"].bandwidth = 1e6
    return costs


def entry(load_s, compute_s, beside=True):
    """An entry that takes so long to load or to compute."""
    return Load("disk", int(load_s * 1e6), int(compute_s * 1e3), beside)


def seconds(loads, computed):
    kept = [load for i, load in enumerate(loads) if i not in computed]
    first = sum(load.size for load in kept if not load.beside) / 1e6
    beside = sum(load.size for load in kept if load.beside) / 1e6
    return first + max(beside, sum(loads[i].work for i in computed) / 1e3)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("scale", [0.1, 0.9, 1.1, 10.0])
def test_all_or_nothing_where_one_way_is_better(costs, scale, beside):
    loads = [entry(scale, 1.0, beside)]
    assert costs.to_compute(MODEL, loads) == (set() if scale < 1 else {0})


def test_both_at_once_where_that_is_quicker(costs):
    loads = [entry(1.0, 1.0)] * 4
    assert len(costs.to_compute(MODEL, loads)) == 2
    assert costs.to_compute(MODEL, [entry(1.0, 1.1, beside=False)] * 4) == set()


@pytest.mark.parametrize("seed", range(20))
def test_never_much_worse_than_the_best_plan_there_is(costs, seed):
    import random

    draw = random.Random(seed)
    loads = [entry(draw.random(), draw.random(), draw.random() < 0.7) for _ in range(6)]
    plans = [set(plan) for n in range(7) for plan in combinations(range(6), n)]
    chosen = seconds(loads, costs.to_compute(MODEL, loads))
    assert chosen <= min(seconds(loads, set()), seconds(loads, set(range(6)))) + 1e-9
    assert chosen <= 1.5 * min(seconds(loads, plan) for plan in plans)


def test_what_computing_would_not_find_out_is_loaded_however_slowly(costs):
    slow = entry(10.0, 0.1)
    assert costs.to_compute(MODEL, [slow._replace(needed=True), slow]) == {1}
    assert costs.to_compute(MODEL, [slow._replace(needed=True)] * 2) == set()
    assert not costs.uncertain(MODEL, [slow._replace(needed=True)])


def test_an_unknown_model_loads_and_is_measured(costs):
    loads = [entry(100.0, 0.1)]
    assert costs.to_compute("other", loads) == set()
    assert costs.uncertain("other", loads)


def test_a_first_pass_is_slow_and_a_pass_has_its_own_cost(costs):
    costs.measure_prefill("other", 100, 3.0)
    costs.measure_prefill("other", 10, 0.1)
    assert costs.token_s["other"] == pytest.approx(0.03)
    costs.measure_prefill("other", 100, 0.3)
    assert costs.token_s["other"] == pytest.approx(0.002)
    assert not costs.uncertain("other", [entry(100.0, 0.1)])


def test_a_far_tier_is_asked_until_it_is_known_to_be_slow(costs):
    def worth(chunks=2, size=512_000, work=512.0):  # which takes 0.5 s to compute
        return costs.worth_asking("remote", MODEL, chunks, size, work)

    assert worth()
    costs.measure_look("remote", 0.1)
    assert worth()
    costs.measure_look("remote", 3.0)
    assert not worth()
    assert worth(chunks=0)
    assert worth(work=20_000.0)
    costs.tiers["remote"].bandwidth = 1e5
    assert not worth(size=8_000_000, work=20_000.0)


def test_what_is_missing_is_computed_anyway(costs):
    loads = [entry(1.0, 1.0)] * 4
    assert len(costs.to_compute(MODEL, loads, work=0.0)) == 2
    assert costs.to_compute(MODEL, loads, work=3_500.0) == set()


def test_speeds_outlive_the_process_and_damage_is_harmless(tmp_path):
    path = tmp_path / "costs.json"
    costs = Costs(path)
    costs.measure_prefill(MODEL, 100, 1.0)
    costs.measure_load("disk", 10**6, 1.0)
    costs.measure_chunks(1, 100)
    costs.save()
    again = Costs(path)
    assert again.token_s == costs.token_s
    assert again.tiers == costs.tiers
    assert again.chunk_tokens == costs.chunk_tokens
    for damage in ("", "[]", "{", '{"tiers": {"disk": {"no": 1}}}', '{"token_s": {"m": "x"}}'):
        path.write_text(damage)
        assert Costs(path).tiers.keys() == costs.tiers.keys()
