"""Words are what blanks separate, and characters in scripts without blanks."""

import re

import pytest

from jax_ragrl.text.words import search_words, word_spans

SPACED = [
    *("The Eiffel Tower, in Paris (1889).", "Я люблю Тёплый стан", "서울은 대한민국의 수도이다."),
    *("naïve e\u0301", "", " \t\n", "हिन्दी में शब्द", "كتاب عربي", "x_1 2.5 a-b", "\x1ca\u00a0b"),
    *("ελληνικά", "שלום עולם"),
]


def units(text):
    return [text[start:end] for start, end in word_spans(text)]


@pytest.mark.parametrize("text", SPACED)
def test_scripts_with_blanks_are_split_as_ever(text):
    assert units(text) == text.split()
    assert search_words(text) == re.findall(r"\w+", text.lower())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("乌尔姆位于。", ["乌", "尔", "姆", "位", "于。"]),
        ("iPhone手机（新） ok", ["iPhone", "手", "机", "（", "新）", "ok"]),
        ("第12章", ["第", "12", "章"]),
        ("ที่นี่", ["ที่", "นี่"]),
        ("カ\u3099", ["カ\u3099"]),
        ("ភាសាខ្មែរ", ["ភា", "សា", "ខ្មែ", "រ"]),
        ("မြန်မာ", ["မြ", "န်", "မာ"]),
        ("ພາສາ", ["ພ", "າ", "ສ", "າ"]),
        ("𠮷野家", ["𠮷", "野", "家"]),
    ],
)
def test_a_character_with_its_marks_is_a_word(text, expected):
    assert units(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("多瑙河", {"多", "瑙", "河", "多瑙", "瑙河"}),
        ("ドナウ", {"ドナ", "ナウ"}),
        ("東京は", {"東", "京", "東京", "京は"}),
        ("の", {"の"}),
        ("GDP增长3%", {"gdp", "增", "长", "增长", "3"}),
        ("ที่นี่", {"ที่นี่"}),
    ],
)
def test_pairs_of_characters_are_searched(text, expected):
    assert set(search_words(text)) == expected
