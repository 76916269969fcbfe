"""Lines of events that are alike: a burst, then so many a second, and what was left out is told."""

from pyruntime.telemetry.quota import BURST, PER_S, LineQuota


def test_a_burst_has_its_lines_and_a_flood_some_of_them():
    now = 5.0
    quota = LineQuota(lambda: now)
    assert [quota.take("a") for _ in range(int(BURST))] == [0] * int(BURST)
    assert [quota.take("a") for _ in range(7)] == [None] * 7
    assert quota.take("b") == 0  # of another kind
    now += 1 / PER_S + 1e-9
    assert [quota.take("a"), quota.take("a")] == [7, None]
    now += 2 / PER_S
    assert [quota.take("a"), quota.take("a"), quota.take("a")] == [1, 0, None]
    now += 1e6  # quiet for long: no more than a burst is saved up
    assert [quota.take("a") for _ in range(int(BURST) + 1)] == [1, *[0] * (int(BURST) - 1), None]


def test_a_steady_flood_gets_its_rate():
    now = 0.0
    quota = LineQuota(lambda: now)
    told = []
    for _ in range(10_000):
        now += 0.01
        told.append(quota.take("a"))
    lines = [each for each in told if each is not None]
    assert abs(len(lines) - (BURST + 100 * PER_S)) <= 1
    assert sum(lines) + len(lines) + next(n for n, each in enumerate(reversed(told)) if each is not None) == len(told)
