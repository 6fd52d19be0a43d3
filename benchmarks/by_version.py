"""Two versions of cuDNN beside each other: rows of benchmarks that ran with each of them.

`python -m benchmarks.by_version OLD NEW --out FILE` takes our GPU times from two folders of
results, of one GPU and one commit, for every case that both have. Which cuDNN a folder is of, its
files say. Another cuDNN than torch's is loaded by `LD_PRELOAD=.../libcudnn.so.9`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import OURS, Rows, cudnn_name, pivot

METRIC = "gpu_ms"


def beside(old: Path, new: Path) -> Rows:
    """A case for each of both folders' benchmarks, under its name; an implementation a version.

    Raises:
        ValueError: a benchmark ran with one cuDNN twice, or its files are of two GPUs or commits.
    """
    rows: Rows | None = None
    for path in sorted(new.glob("*.json")):
        if not (old / path.name).exists():
            continue
        both = [json.loads((folder / path.name).read_text()) for folder in (old, new)]
        environments = [found["env"] for found in both]
        for name in ("gpu", "commit"):
            if environments[0][name] != environments[1][name]:
                raise ValueError(f"{path.name}: {name} is another one in {old} than in {new}")
        versions = [cudnn_name(environment["cudnn"]) for environment in environments]
        if versions[0] == versions[1]:
            raise ValueError(f"{path.name}: both runs are of cuDNN {versions[0]}")
        rows = rows or Rows(environments[0])
        earlier, later = (pivot(found["rows"], METRIC) for found in both)
        for case in earlier:
            if OURS in earlier[case] and OURS in later.get(case, {}):
                for version, times in zip(versions, (earlier, later), strict=True):
                    rows.add(f"{path.stem}: {case}", f"cuDNN {version}", METRIC, times[case][OURS])
    if rows is None:
        raise ValueError(f"{old} and {new} have no results of one benchmark")
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.by_version")
    parser.add_argument("old", type=Path, help="results with one cuDNN")
    parser.add_argument("new", type=Path, help="with the other one")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for the rows")
    args = parser.parse_args(arguments)
    beside(args.old, args.new).write(args.out)


if __name__ == "__main__":
    main()
