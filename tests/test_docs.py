"""The documentation: every example runs by itself, the build has no warning, no name is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

import cudnn_ops
from tests.conftest import DEVICES

pytest.importorskip("sybil", reason="a machine that only runs GPU tests may lack it")
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

from benchmarks import notebooks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
#: The first line of an example that runs on a GPU only, for its readers too.
NEEDS_GPU = "# Requires a GPU."
MOST_THAT_NEED_A_GPU = 1


def run_by_itself(example: Example) -> None:
    """Without what the examples before it have defined."""
    example.namespace.clear()
    example.namespace["__name__"] = "__main__"
    PythonEvaluator()(example)


PARSER = Sybil([CodeBlockParser("python", run_by_itself)])
EXAMPLES = [
    example
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
    if page not in notebooks.PAGES
    for example in PARSER.parse(page).examples()
]


def needs_gpu(example: Example) -> bool:
    return example.parsed.startswith(NEEDS_GPU)


@pytest.fixture(autouse=True)
def attention_of_transformers() -> Iterator[None]:
    """What an example registers under our name is put back, for the process's other tests."""
    yield
    if transformers := sys.modules.get("cudnn_ops.integrations.transformers"):
        transformers.register()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "example", EXAMPLES, ids=[f"{Path(e.path).relative_to(ROOT)}:{e.line}" for e in EXAMPLES]
)
def test_an_example_runs(
    example: Example, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU; on a GPU those that choose one, and those that need one."""
    if device == "cpu" and needs_gpu(example):
        compile(example.parsed, example.path, "exec")
        return
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch._dynamo.reset()
    with cudnn_ops.using_plan_policy(cudnn_ops.plan_policy()):
        example.evaluate()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", notebooks.PAGES, ids=[page.stem for page in notebooks.PAGES])
def test_a_notebook_runs(
    page: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first block to the last, and draws the figures that it shows."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    monkeypatch.chdir(tmp_path)
    notebooks.run(page)
    pyplot.close("all")
    shown = re.findall(r"^!\[.+\]\((.+\.svg)\)$", page.read_text(), re.MULTILINE)
    assert shown
    assert {file.name for file in tmp_path.iterdir()} == set(shown)
    assert all((notebooks.FOLDER / name).exists() for name in shown)


def test_few_examples_need_a_gpu() -> None:
    assert sum(map(needs_gpu, EXAMPLES)) <= MOST_THAT_NEED_A_GPU
    assert all('device="cuda"' not in e.parsed for e in EXAMPLES if not needs_gpu(e))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_outside_of_the_build_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_messages_under_troubleshooting_are_those_of_the_sources() -> None:
    sources = [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "cudnn_ops").rglob("*.py")]
    # String literals that stand one behind the other are one.
    said = re.sub(r'"\s*f?"', "", "".join(path.read_text() for path in sources))
    tables = (DOCS / "troubleshooting.md").read_text().split("| message |")[1:]
    shown = [text for table in tables for text in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)]
    pieces = {
        piece.strip()
        for text in re.findall(r"`(.*?)`", " ".join(shown))
        for piece in text.split("...")
    }
    assert len(pieces) > 10
    assert [piece for piece in pieces if piece not in said] == []


def test_a_report_has_its_environment() -> None:
    """The form is one that GitHub accepts, as far as that can be seen here."""
    yaml = pytest.importorskip("yaml")
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    fields = {field["id"]: field for field in form["body"] if field["type"] != "markdown"}
    assert {field["type"] for field in fields.values()} <= {"textarea", "dropdown"}
    assert all(field["attributes"]["label"] for field in fields.values())
    environment = fields["environment"]
    assert environment["validations"]["required"]
    assert "python -m cudnn_ops.collect_env" in environment["attributes"]["description"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


ADAPTERS = (
    ".integrations.transformers",
    ".integrations.transformers_serving",
    ".integrations.diffusers",
)
SERVER = (".server", ".server.app", ".server.running")


def public_modules() -> Iterator[ModuleType]:
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    pytest.importorskip("fastapi")
    for name in ("", ".distributed", ".generation", ".nn", *ADAPTERS, *SERVER):
        yield import_module(f"cudnn_ops{name}")


def test_it_builds_without_warnings_and_has_every_public_name(tmp_path: Path) -> None:
    """In one test, for each process of pytest-xdist would build it."""
    from sphinx.util.inventory import InventoryFile

    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    command += ["-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr

    with (tmp_path / "html" / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, path: path)
    documented = {name for kind, names in inventory.items() if "py:" in kind for name in names}
    public = {f"{m.__name__}.{name}" for m in public_modules() for name in m.__all__}
    assert public - documented == set()

    contents = (tmp_path / "html" / "index.html").read_text()
    pages = (page.relative_to(DOCS) for page in DOCS.rglob("*.md") if page.name != "index.md")
    assert [page for page in pages if f'href="{page.with_suffix(".html")}"' not in contents] == []
