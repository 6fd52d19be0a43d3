"""benchmarks/by_version.py: which rows of two runs stand beside each other."""

import json

import pytest

from benchmarks.by_version import main
from benchmarks.tables import by_version


def _write(folder, cudnn, ours, commit="a" * 40):
    folder.mkdir(exist_ok=True)
    rows = [
        {"case": case, "impl": impl, "metric": metric, "value": value}
        for case, value in ours.items()
        for impl, metric in (("cudnn_ops", "gpu_ms"), ("eager", "gpu_ms"), ("cudnn_ops", "host_us"))
    ]
    env = {"gpu": "NVIDIA H200", "commit": commit, "cudnn": cudnn}
    (folder / "sdpa.json").write_text(json.dumps({"env": env, "rows": rows}))
    return folder


def test_our_times_of_the_cases_of_both(tmp_path):
    old = _write(tmp_path / "old", 91900, {"a fwd": 1.0, "b fwd": 2.0, "c fwd": 4.0})
    new = _write(tmp_path / "new", 92801, {"b fwd": 1.0, "c fwd": 8.0, "d fwd": 1.0})
    main([str(old), str(new), "--out", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["case"], row["impl"], row["value"]) for row in rows] == [
        ("sdpa: b fwd", "cuDNN 9.19.0", 2.0),
        ("sdpa: b fwd", "cuDNN 9.28.1", 1.0),
        ("sdpa: c fwd", "cuDNN 9.19.0", 4.0),
        ("sdpa: c fwd", "cuDNN 9.28.1", 8.0),
    ]
    header, line = by_version(rows)
    assert header[-1] == "most"
    assert line == ["sdpa", "2", "1.00", "0.50, b fwd", "2.00, c fwd"]


def test_runs_that_do_not_belong_together(tmp_path):
    old = _write(tmp_path / "old", 91900, {"a": 1.0})
    for name, cudnn, commit, message in (
        ("same", 91900, "a" * 40, "both runs are of cuDNN 9.19.0"),
        ("other", 92801, "b" * 40, "commit is another one"),
    ):
        new = _write(tmp_path / name, cudnn, {"a": 1.0}, commit)
        with pytest.raises(ValueError, match=message):
            main([str(old), str(new), "--out", str(tmp_path / "rows.json")])
    with pytest.raises(ValueError, match="no results of one benchmark"):
        main([str(old), str(tmp_path), "--out", str(tmp_path / "rows.json")])
