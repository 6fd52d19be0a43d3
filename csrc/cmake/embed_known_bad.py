"""Writes the rules about what cuDNN computes wrongly as C++, so that they hold without Python too.

    python embed_known_bad.py cudnn_ops/support known_bad_rules.h

Whoever loads the operators' library gets them: a C++ program that runs an exported model must
refuse the same plans.
"""

import json
import sys
from pathlib import Path
from typing import Any


def cpp(value: Any) -> str:
    """A number, a text or a list of either as an initializer of C++."""
    if isinstance(value, (tuple, list)):
        return "{" + ", ".join(map(cpp, value)) + "}"
    if isinstance(value, str):
        return json.dumps(value)  # its escapes are C++'s too
    return str(int(value))


def main(folder: str, header: str) -> None:
    # By itself: the package needs the library that is being built.
    sys.path.insert(0, folder)
    import known_bad

    rules = map(known_bad.as_numbers, known_bad.known_bad())
    fields = ("id", "plan", "cudnn", "sm", "when", "reason")
    lines = ["    " + cpp([rule[name] for name in fields]) + ",\n" for rule in rules]
    Path(header).write_text(
        '#include "graph/known_bad.h"\n\nnamespace cudnn_ops::graph {\n\n'
        "inline std::vector<KnownBad> rules_of_the_package() {\n  return {\n"
        + "".join(lines)
        + "  };\n}\n\n}  // namespace cudnn_ops::graph\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
