"""Imports point one way: a module may import only from its own layer or from lower ones."""

import ast
from pathlib import Path

import pytest

import noloco_mega

ROOT = Path(noloco_mega.__file__).parent
LAYERS = [
    ["grid", "deepspeed_keys", "plan.keys", "plan.pairing", "plan.stability", "quiet"],
    ["checks", "config", "costs", "device", "hostfile", "mcore_compat", "report", "versions"],
    ["plan"],
    ["comm", "launcher"],
    ["model", "data", "engine", "outer", "entry"],
    ["pipeline", "checkpoint", "findings", "metrics", "journal", "bootstrap", "gathering"],
    ["streamed"],
    ["merging"],
    ["convert", "start"],
    ["lab"],
    ["train", "preflight"],
    ["cli", "__main__"],
]
PURE = {"torch", "megatron", "deepspeed"}


def modules():
    return sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py")


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def layer_of(name):
    for level in range(len(LAYERS)):
        if name in LAYERS[level]:
            return level
    for level, entries in enumerate(LAYERS):
        if name.split(".")[0] in entries:
            return level
    raise AssertionError(f"{name} has no layer: add it to LAYERS, and to the map in the README")


def imports(path):
    """Dotted names that a file imports when it is loaded or run, type-checking blocks left out."""
    found = []

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.extend([node.module] + [f"{node.module}.{alias.name}" for alias in node.names])
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_point_down(path):
    name = name_of(path)
    for imported in imports(path):
        if not imported.startswith("noloco_mega."):
            continue
        target = imported.removeprefix("noloco_mega.")
        if not any(candidate in (target, target + ".__init__") for candidate in map(name_of, modules())):
            continue
        assert layer_of(target) <= layer_of(name), f"{name} imports {target}, which lies above it"


def test_the_plan_is_pure():
    for path in modules():
        if name_of(path).startswith("plan.") or name_of(path) in ("grid", "checks", "config", "deepspeed_keys"):
            assert not PURE & {imported.split(".")[0] for imported in imports(path)}, name_of(path)


def test_only_the_device_files_say_torch_cuda():
    for path in modules():
        if name_of(path) not in ("device", "mcore_compat"):
            assert "torch.cuda" not in path.read_text(), f"{name_of(path)} says torch.cuda"
