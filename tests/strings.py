"""Strings that tokenizers disagree on, drawn by a seed."""

import random

FIXED = [
    "", " ", "  ", "\n", "\n\n", "\t", " a", "  a", "a ", " a ", " \n a", "a\n\nb", "\r\n", "\x00", "a\x00b",
    "\x01\x02", "\x7f", "\x85", "\u00a0a", "\u3000日本", "\u200b", "\ufeffa", "\ufffd", "\u2581", "a\u2581b",
    "\u2581\u2581a", " \u2581", "é", "e\u0301", "ﬁ", "½", "ＡＢＣ", "한국어", "العربية", "हिन्दी", "😀",
    "👩\u200d👩\u200d👧", "🇨🇳", "a😀b", "\U00020000", "中文测试", "<s>", "</s>", "<unk>", "<pad>", "a<s>b", "</s>x",
    " <s> ", "<0x0A>", "a<0x41>b", "[INST] hi [/INST]", "1234567890", "3.14159", "1e-5", "def f(x):\n    return x\n",
    "\tif a:\n\t\tb", '{"a": [1, 2]}', "a" * 300, "ab " * 100, " " * 50, "\n" * 50, "—–…“”", "\x1b[31mred\x1b[0m",
    "\U0010ffff", "\ue000", "İstanbul", "❤\ufe0f",
]  # fmt: skip
RANGES = [
    (0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x4FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
    (0x1F300, 0x1FAFF), (0, 0x1F), (0x2000, 0x206F), (0x600, 0x6FF),
]  # fmt: skip
INSERTS = [" ", "  ", "\n", "\t", "😀", "中", "\x00", "\u00a0", "<s>", "</s>", "<unk>", "<0x41>", "\u200b", "▁", "é"]


def strings(count: int, texts: list[str], seed: int = 0, inserts: tuple[str, ...] = ()) -> list[str]:
    """FIXED, and then pieces of `texts`, random characters, and pieces with INSERTS in them."""
    draw, found = random.Random(seed), list(FIXED)
    while len(found) < count:
        text = draw.choice(texts)
        start = draw.randrange(len(text))
        kind = draw.random()
        if kind < 0.5:
            found.append(text[start : start + draw.choice([5, 20, 80, 300])])
        elif kind < 0.75:
            found.append("".join(chr(draw.randint(*draw.choice(RANGES))) for _ in range(draw.randint(1, 40))))
        else:
            piece = text[start : start + 40]
            for _ in range(draw.randint(1, 6)):
                place = draw.randrange(len(piece) + 1)
                piece = piece[:place] + draw.choice([*INSERTS, *inserts]) + piece[place:]
            found.append(draw.choice(["", " ", "   ", "\n"]) + piece)
    return found
