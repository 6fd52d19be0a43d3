"""Runs the notebooks of the documentation: `python -m benchmarks.notebooks` draws their figures.

A notebook is a page of Markdown whose Python blocks run one behind the other (Jupytext opens it in
Jupyter). What it prints is not stored. Its figures are, beside it, for readers on GitHub.
"""

import os
from pathlib import Path

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")


def run(page: Path) -> None:
    """Runs a notebook in the working folder, where it saves its figures."""
    for example in Sybil([PythonCodeBlockParser()]).parse(page).examples():
        example.evaluate()


def main() -> None:
    """Draws the figures of all notebooks; the same numbers give the same files."""
    import matplotlib as mpl
    import torch

    torch.set_num_threads(1)  # small tensors: more threads only wait for each other
    mpl.use("Agg")
    mpl.rcParams |= {"svg.hashsalt": "cudnn_ops", "svg.fonttype": "none"}
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    os.chdir(FOLDER)
    for page in PAGES:
        run(page)


if __name__ == "__main__":
    main()
