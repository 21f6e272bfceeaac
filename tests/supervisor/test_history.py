from veloxquant.supervisor.history import History
from veloxquant.supervisor.messages import Stats


def test_points_are_a_second_apart_and_keep_the_peak_of_bytes():
    history = History()
    for n in range(40):
        history.add(n * 0.25, Stats(footprint=100 + (n % 4), decode_tps=float(n)))
    points = history.points()
    assert [p.t for p in points] == [float(n) for n in range(10)]
    assert {p.footprint for p in points} == {103}
    assert points[0].decode_tps == 3.0


def test_ring_covers_a_quarter_of_an_hour():
    history = History()
    for n in range(2_000):
        history.add(float(n), Stats())
    points = history.points()
    assert (points[0].t, points[-1].t) == (1_100.0, 1_999.0)


def test_summary_is_of_this_run_only():
    history = History()
    history.add(0.0, Stats(footprint=5, done=3))
    assert history.summary()["peak_footprint"] == 5
    assert history.summary()["done"] == 3
    history.new_run()
    assert "peak_footprint" not in history.summary()
    assert len(history.points()) == 1
