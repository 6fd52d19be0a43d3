"""The support tables of the documentation are what cuDNN answers, for described GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cudnn_ops.__main__ import main
from cudnn_ops.support import table as support_table

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def shown(device: str) -> dict[str, list[str]]:
    """Rows of the table that the documentation has for a GPU, by their names; "" is the header."""
    for page in PAGES:
        pattern = rf"<!-- support:{device} -->\n(.*?)\n<!-- /support:"
        if found := re.search(pattern, page.read_text(), re.DOTALL):
            lines = [line.strip("| ").split(" | ") for line in found[1].splitlines()]
            header, _, *rows = lines
            return {"": header} | {name: cells for name, *cells in rows}
    raise AssertionError(f"no page shows the support table of {device}")


def told_apart(cells: list[str]) -> list[int]:
    """Columns that say all: both ends, and both sides of every change."""
    last = len(cells) - 1
    return [
        i
        for i, cell in enumerate(cells)
        if i in (0, last) or cell != cells[i - 1] or cell != cells[i + 1]
    ]


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_the_documentation_says_what_cudnn_says(device, fresh_cache):
    rows = shown(device)
    assert rows.pop("") == list(support_table.HEAD_SIZES)
    assert list(rows) == list(support_table.FEATURES)
    attention = support_table.TABLES["attention"]
    for feature, cells in rows.items():
        columns = [list(support_table.HEAD_SIZES)[i] for i in told_apart(cells)]
        table = support_table.Table(
            {feature: support_table.FEATURES[feature]},
            {name: support_table.HEAD_SIZES[name] for name in columns},
            attention.ask,
        )
        answers = list(support_table.support_table(device, table))
        for answer in answers:
            # Where there is nothing to ask cuDNN for, and no more than this.
            is_ours = answer.reason.startswith("a kernel of cudnn_ops runs")
            assert not is_ours or (feature, answer.direction) == ("paged, few queries", "forward")
            assert answer.supported == (is_ours or not answer.reason)
        _, (_, *found) = support_table.as_lines(answers, table)
        assert found == [cells[i] for i in told_apart(cells)], feature


def test_told_apart():
    assert told_apart(["yes"] * 6) == [0, 5]
    assert told_apart(["yes", "yes", "yes", "forward", "forward", "forward"]) == [0, 2, 3, 5]
    assert told_apart(["no", "yes", "no"]) == [0, 1, 2]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of few cells."""
    tables = support_table.TABLES
    for name, rows, columns in (
        ("attention", ("full", "packed"), ("64", "512")),
        ("norms", ("layer_norm",), ("100",)),
        ("convolutions", ("conv2d", "conv2d, depthwise"), ("bfloat16",)),
        ("linear", ("linear, bias", "mlp, silu", "mlp, relu6"), ("bfloat16",)),
    ):
        table = tables[name]
        part = support_table.Table(
            {row: table.rows[row] for row in rows},
            {column: table.columns[column] for column in columns},
            table.ask,
        )
        monkeypatch.setitem(tables, name, part)


@pytest.mark.usefixtures("small")
def test_the_command_prints_it(capsys):
    assert main(["support", "--device", "h200", "--reasons"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == [
        "        64       512",
        "full    yes      forward",
        "packed  yes      forward",
    ]
    assert [line.partition(":")[0] for line in out[3:]] == [
        "backward, full, 512",
        "backward, packed, 512",
    ]
    assert main(["support", "norms", "--device", "L4", "--markdown"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "| layer_norm | yes |"
    assert main(["support", "convolutions", "--device", "rtx 4090"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "conv2d             yes",
        "conv2d, depthwise  yes",
    ]
    assert main(["support", "linear", "--device", "h200"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "linear, bias  yes",
        "mlp, silu     yes",
        "mlp, relu6    no",
    ]
    assert main(["support", "--device", "nothing"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "not a file" in captured.err


def test_every_cell_of_every_table_is_a_question():
    for table in support_table.TABLES.values():
        for name, row in table.rows.items():
            for column in table.columns.values():
                op, operands, options = table.ask(row, column)
                operator = support_table.find_operator(op)
                options = {k: v for k, v in options.items() if k != "grad_mask"}
                kind = support_table.Kind(training=operator.has_backward)
                for attempts in operator.parts(kind, operands, dict(options)):
                    attempt = next(attempts)
                    # Of few queries over pages a kernel of ours runs, with some head sizes.
                    assert attempt.words or (name == "paged, few queries" and attempt.without_plan)


@pytest.mark.usefixtures("small")
def test_each_row_is_printed_as_soon_as_it_is_known(monkeypatch, capsys):
    printed = []

    def answers(device, table, **options):
        for row in table.rows:
            for column in table.columns:
                for direction in support_table.DIRECTIONS:
                    printed.append(capsys.readouterr().out.count("\n"))
                    yield support_table.Answer(row, column, direction, True, "")

    monkeypatch.setattr(support_table, "support_table", answers)
    assert main(["support", "--device", "h200"]) == 0
    # The header, then a row after its four answers.
    assert printed == [1, 0, 0, 0, 1, 0, 0, 0]
