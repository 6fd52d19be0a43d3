"""The support tables of the README are what cuDNN answers, cell by cell, for described GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cudnn_ops.__main__ import main
from cudnn_ops.support import table as support_table

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_the_readme_says_what_cudnn_says(device, fresh_cache):
    answers = list(support_table.support_table(device))
    for answer in answers:
        assert answer.supported == (not answer.reason)
    table = "\n".join(support_table.as_markdown(support_table.as_lines(answers)))
    shown = re.search(rf"<!-- support:{device} -->\n(.*?)\n<!-- /support:", README, re.DOTALL)
    assert shown is not None
    assert shown[1] == table


def test_the_command_prints_it(monkeypatch, capsys):
    monkeypatch.setattr(support_table, "FEATURES", {"full": {}, "window": {"window_size": (8, 0)}})
    monkeypatch.setattr(support_table, "HEAD_SIZES", ((64, 64), (512, 512)))
    assert main(["support", "--device", "h200", "--reasons"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == [
        "        64       512",
        "full    yes      forward",
        "window  yes      forward",
    ]
    assert [line.partition(":")[0] for line in out[3:]] == [
        "sdpa_backward, full, 512/512",
        "sdpa_backward, window, 512/512",
    ]
    assert main(["support", "--device", "nothing"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "not a file" in captured.err


def test_each_row_is_printed_as_soon_as_it_is_known(monkeypatch, capsys):
    monkeypatch.setattr(support_table, "HEAD_SIZES", ((64, 64),))
    printed = []

    def answers(*args, **options):
        for feature in support_table.FEATURES:
            for direction in support_table.DIRECTIONS:
                printed.append(capsys.readouterr().out.count("\n"))
                yield support_table.Answer(feature, (64, 64), direction, True, "")

    monkeypatch.setattr(support_table, "support_table", answers)
    assert main(["support", "--device", "h200"]) == 0
    # The header, then a row after each pair of answers.
    assert printed == [1, 0, *[1, 0] * (len(support_table.FEATURES) - 1)]
