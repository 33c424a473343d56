"""Words, also of scripts that are written without blanks.

Chinese, Japanese, Thai, Lao, Khmer and Burmese have no blanks between words. Their units are
characters with their combining marks, as in the scorers of CMRC and MLQA, and for search the pairs
of neighboring characters, as in Lucene's CJKAnalyzer. Other scripts are not affected.
"""

from __future__ import annotations

import re

Span = tuple[int, int]  # characters of a text, from the first to before the last

_HAN = (
    "\u3005-\u3007\u3021-\u3029\u3031-\u3035\u303b\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U000323af"
)
_KANA = "\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"
_BOPOMOFO = "\u3105-\u312f\u31a0-\u31bf"
_THAI_LAO = (
    "\u0e01-\u0e30\u0e32\u0e33\u0e40-\u0e46\u0e81-\u0eb0\u0eb2\u0eb3\u0ebd-\u0ec6\u0edc-\u0edf"
)
_KHMER = "\u1780-\u17b3\u17d7\u17dc"
_BURMESE = (
    "\u1000-\u102a\u103f\u1050-\u1055\u105a-\u105d\u1061\u1065\u1066\u106e-\u1070\u1075-\u1081\u108e"
    "\ua9e0-\ua9e4\ua9e6-\ua9ef\ua9fa-\ua9fe\uaa60-\uaa76\uaa7a\uaa7e\uaa7f"
)
# Letters only: numbers in the digits of these scripts are words as in any other script.
_LETTERS = f"{_HAN}{_KANA}{_BOPOMOFO}{_THAI_LAO}{_KHMER}{_BURMESE}"
_MARKS = (
    "\u0300-\u036f\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece\u17b4-\u17d3\u17dd"
    "\u102b-\u103e\u1056-\u1059\u105e-\u1060\u1062-\u1064\u1067-\u106d\u1071-\u1074\u1082-\u108d\u108f"
    "\u109a-\u109d\ua9e5\uaa7b-\uaa7d\u302a-\u302d\u3099\u309a\ufe00-\ufe0f\U000e0100-\U000e01ef"
)
# A character with its marks; a consonant below another one (Khmer, Burmese) belongs to it.
_CHARACTER = rf"[{_LETTERS}](?:[\u17d2\u1039][{_LETTERS}]|[{_MARKS}])*"
UNSPACED = re.compile(f"[{_LETTERS}]")
_CHARACTERS = re.compile(_CHARACTER)
_IDEOGRAPH = re.compile(f"[{_HAN}]")
_WORDS = re.compile(r"\w+")
# A run of letters, digits and underscores, or one character of a script without blanks.
WORD = re.compile(rf"{_CHARACTER}|[^\W{_LETTERS}]+")
_RUNS = re.compile(rf"(?P<unspaced>(?:{_CHARACTER})+)|[^\W{_LETTERS}]+")
# Closing punctuation stays with its character, opening punctuation with what follows.
_UNITS = re.compile(rf"{_CHARACTER}[^\w\s（「『【《〈“‘(\[{{]*|[^\s{_LETTERS}]+")
_BLACK = re.compile(r"\S+")


def word_spans(text: str) -> list[Span]:
    """Returns the characters of each word of a text: what blanks separate, or one character."""
    pattern = _UNITS if UNSPACED.search(text) else _BLACK
    return [match.span() for match in pattern.finditer(text)]


def search_words(text: str) -> list[str]:
    """Returns the words of a text that are searched, in order and in lower case.

    They are runs of letters, digits and underscores. A run in a script without blanks is the pairs
    of its neighboring characters; each ideograph is a word too, and so is a single character.
    """
    text = text.lower()
    if not UNSPACED.search(text):
        return _WORDS.findall(text)
    words = []
    for run in _RUNS.finditer(text):
        characters = _CHARACTERS.findall(run[0]) if run["unspaced"] else [run[0]]
        pairs = [a + b for a, b in zip(characters, characters[1:], strict=False)]
        words += [c for c in characters if not pairs or _IDEOGRAPH.match(c)] + pairs
    return words
