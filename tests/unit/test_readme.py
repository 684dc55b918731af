"""The README's map: every file that it names exists, and every module is named."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def named():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `")]
    return [re.match(r"\| `([^`]+)` \|", row)[1] for row in rows]


def test_every_file_of_the_map_exists():
    missing = [name for name in named() if not (ROOT / name).exists()]
    assert not missing and len(named()) == len(set(named()))


def test_every_program_and_module_is_on_the_map():
    folders = ("noloco_mega", "tools", "tokenizer", "launch")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh")]
    here = {str(path.relative_to(ROOT)) for path in files if path.name != "__init__.py"}
    assert here <= set(named()), here - set(named())


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_programs_that_import_their_neighbours_are_started_as_modules():
    """`python tools/X.py` does not find the folder `tools` itself."""
    for path in (ROOT / "tools").rglob("*.py"):
        text = path.read_text()
        if re.search(r"^(from|import) tools\b", text, re.MULTILINE):
            assert f"python {path.relative_to(ROOT)}" not in text, path
