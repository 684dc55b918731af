"""Write the Python standard library's own sources as a .jsonl corpus: text that every machine with Python has.

    python -m tools.stdlib_corpus --output corpus.jsonl [--max-megabytes 8]

One document per file, in the order of the paths: {"path": ..., "text": ...}. The same Python installation gives the
same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from noloco_mega.entry import guarded

ELSEWHERE = frozenset({"site-packages", "dist-packages", "__pycache__"})
TESTS = frozenset({"test", "tests", "idle_test", "testing"})


def sources(root: Path, with_tests: bool) -> list[Path]:
    """The .py files below `root`, sorted, relative to it; installed packages left out."""
    skipped = ELSEWHERE if with_tests else ELSEWHERE | TESTS
    inside = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
    return sorted(path for path in inside if not skipped.intersection(path.parts[:-1]))


def read(root: Path, paths: Sequence[Path]) -> tuple[list[tuple[Path, str]], int]:
    """The texts of the files, and how many were left out because they are empty or not UTF-8."""
    texts = []
    for path in paths:
        try:
            text = (root / path).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            texts.append((path, text))
    return texts, len(paths) - len(texts)


def capped(texts: Sequence[tuple[Path, str]], max_bytes: float) -> list[tuple[Path, str]]:
    """As many of the texts as fit, chosen by a hash of their paths so that no corner of the library is favoured."""

    def by_hash(item: tuple[Path, str]) -> bytes:
        return hashlib.sha256(item[0].as_posix().encode()).digest()

    chosen, taken_bytes = [], 0
    for item in sorted(texts, key=by_hash):
        size_bytes = len(item[1].encode())
        if taken_bytes + size_bytes <= max_bytes:
            chosen.append(item)
            taken_bytes += size_bytes
    return sorted(chosen)


def write(path: Path, texts: Sequence[tuple[Path, str]]) -> None:
    """Write beside, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", newline="\n", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as beside:
        for name, text in texts:
            beside.write(json.dumps({"path": name.as_posix(), "text": text}) + "\n")
    os.chmod(beside.name, 0o644)
    os.replace(beside.name, path)


def run(chosen: argparse.Namespace) -> None:
    root = Path(sysconfig.get_path("stdlib"))
    texts, left_out = read(root, sources(root, chosen.with_tests))
    texts = capped(texts, chosen.max_megabytes * 1e6)
    if not texts:
        raise ValueError(f"{root} gave no document within {chosen.max_megabytes:g} MB")
    write(chosen.output, texts)
    megabytes = sum(len(text.encode()) for _, text in texts) / 1e6
    print(f"{chosen.output}: {len(texts)} files, {megabytes:.1f} MB; {left_out} empty or not UTF-8 were left out")


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description="Write the Python standard library's sources as a .jsonl corpus.")
    options.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    options.add_argument("--max-megabytes", type=float, default=float("inf"), help="stop at so much text")
    options.add_argument("--with-tests", action="store_true", help="include the library's own tests")
    return guarded(run, options.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
