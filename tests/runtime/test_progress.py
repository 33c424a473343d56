"""Long loops say how far they are, not only on a terminal, and not too often."""

from jax_ragrl.runtime import progress


def test_lines_come_every_30_seconds_with_rate_and_time_left(capsys):
    now = [0.0]
    lines = progress.Lines("embed", "passage", 4000, clock=lambda: now[0])
    for seconds in range(1, 66):
        now[0] = float(seconds)
        lines.update(10)
    assert capsys.readouterr().err.splitlines() == [
        "ragrl: embed: 300 of 4,000 passages, 10.0 per s, about 6 min left",
        "ragrl: embed: 600 of 4,000 passages, 10.0 per s, about 6 min left",
    ]


def test_a_short_loop_prints_nothing_without_a_terminal(capsys):
    assert list(progress.track(range(3), "read", "passage")) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_an_unknown_total_has_no_time_left(capsys):
    now = [0.0]
    lines = progress.Lines("read", "passage", clock=lambda: now[0])
    now[0] = 40.0
    lines.update(80)
    assert capsys.readouterr().err == "ragrl: read: 80 passages, 2.0 per s\n"


def test_a_duration_has_its_largest_unit():
    texts = [progress.duration(seconds) for seconds in (5, 119, 120, 7199, 7200)]
    assert texts == ["5 s", "119 s", "2 min", "120 min", "2 h"]
