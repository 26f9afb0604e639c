import pytest

from medfed.federation.lightning.schedule import EvaluationTasks, padded, shard, tasks_of_round

CLIENTS = [f"c{i}" for i in range(5)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("chosen", [CLIENTS, ["c0", "c2", "c4"], ["c3"], []])
def test_every_rank_has_equally_many_tasks(ranks, chosen):
    phases = ("sketch", "fit", "fit")
    per_rank = [tasks_of_round(4, phases, chosen, CLIENTS, r, ranks) for r in range(ranks)]
    assert len({len(tasks) for tasks in per_rank}) == 1
    for position, _ in enumerate(per_rank[0]):
        at = [tasks[position] for tasks in per_rank]
        assert len({(t.round, t.phase, t.closes) for t in at}) == 1
    for tasks in per_rank:
        assert sum(t.closes for t in tasks) == len(phases)
    width = len(per_rank[0]) // len(phases)
    for k in range(len(phases)):
        block = [t.client for tasks in per_rank for t in tasks[k * width : (k + 1) * width]]
        assert sorted(c for c in block if c) == chosen


def test_a_client_stays_at_its_rank_whoever_else_takes_part():
    for rank in range(2):
        own = shard(CLIENTS, rank, 2)
        assert {c for c in padded(["c1", "c2", "c4"], CLIENTS, rank, 2) if c} <= set(own)


def test_evaluation_tasks_are_one_loader():
    tasks = EvaluationTasks(tasks_of_round(-1, ["val"], CLIENTS, CLIENTS, 1, 2))
    assert len(tasks) == len(list(tasks)) == 3
    assert [t.client for t in tasks] == ["c1", "c3", None]
