"""The build of the documentation: `make docs`. Its warnings are errors; it needs no network."""

import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import cudnn_ops  # noqa: E402
from benchmarks import plots, tables  # noqa: E402

project = "cudnn_ops"
author = "cudnn_ops contributors"
project_copyright = author
release = version = cudnn_ops.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
]
exclude_patterns = ["plots"]
html_theme = "furo"
html_title = f"cudnn_ops {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# The prompt and what a command prints are not copied.
copybutton_prompt_text = "$ "

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88

# A reference to a name that is not documented is an error, unless it is somebody else's or that of
# a module, which have no pages.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|transformers|diffusers|fastapi|collections|pathlib|typing|os)\..*"),
    (
        r"py:(class|data|func)",
        r"(Tensor|Path|Self|(nn\.)?(Module|Linear)|Parameter|GraphModule|sdpa_mask|Activation"
        r"|(NORM_)?PLANS|LINEAR_(STEPS|ENGINES))",
    ),
    (r"py:mod", r"cudnn_ops\..*"),
]


class _Docstring(GoogleDocstring):
    """Google's style, where types stand in annotations alone: no colon ends a type."""

    def _consume_returns_section(
        self, preprocess_types: bool = False
    ) -> list[tuple[str, str, list[str]]]:
        return [("", "", self._dedent(self._consume_to_next_section()))]


_STYLE = Config(napoleon_use_rtype=False)


def _convert(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    if what not in ("attribute", "data", "property"):  # their docstrings have no sections
        lines[:] = _Docstring(lines, _STYLE, app, what, name, obj, options).lines()


def _draw(app: Sphinx) -> None:
    for name in plots.PLOTS:
        (HERE / "plots" / f"{name}.svg").write_text(plots.svg(name, tables.RESULTS))


def setup(app: Sphinx) -> None:
    """Draws the plots before the pages are read, and reads docstrings."""
    app.connect("builder-inited", _draw)
    app.connect("autodoc-process-docstring", _convert)
