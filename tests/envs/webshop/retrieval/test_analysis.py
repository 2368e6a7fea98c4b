"""The analyzer chain gives the same terms as Lucene's, recorded with Anserini 1.7.1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxgym.envs.webshop.retrieval import analysis
from sandboxgym.envs.webshop.retrieval.analysis import MAX_TOKEN, analyze, terms, tokens
from sandboxgym.envs.webshop.retrieval.porter import stem

# From the paper, where its rules are explained one by one.
PAPER = """
caresses caress  ponies poni  ties ti  caress caress  cats cat  feed feed  agreed agre  plastered plaster  bled bled
motoring motor  sing sing  conflated conflat  troubled troubl  sized size  hopping hop  tanned tan  falling fall
hissing hiss  fizzed fizz  failing fail  filing file  happy happi  sky sky  relational relat  conditional condit
rational ration  valenci valenc  hesitanci hesit  digitizer digit  conformabli conform  radicalli radic
differentli differ  vileli vile  analogousli analog  vietnamization vietnam  predication predic  operator oper
feudalism feudal  decisiveness decis  hopefulness hope  callousness callous  formaliti formal  sensitiviti sensit
sensibiliti sensibl  triplicate triplic  formative form  formalize formal  electriciti electr  electrical electr
hopeful hope  goodness good  revival reviv  allowance allow  inference infer  airliner airlin  gyroscopic gyroscop
adjustable adjust  defensible defens  irritant irrit  replacement replac  adjustment adjust  dependent depend
adoption adopt  homologou homolog  communism commun  activate activ  angulariti angular  homologous homolog
effective effect  bowdlerize bowdler  probate probat  rate rate  cease ceas  controll control  roll roll
technology technolog  possibly possibl  us us  is is  s s  100s 100  yyy yyi  say sai
"""
STEMS = PAPER.split()

LUCENE = {
    "ps：a ps：": ["ps：a", "ps"],
    "ﾟ aﾟ カﾟ": ["aﾟ", "カﾟ"],
    "❤️ 👍🏽 👨‍👩‍👧 🇺🇸 1️⃣ # #️⃣": ["❤️", "👍🏽", "👨‍👩‍👧", "🇺🇸", "1️⃣", "#️⃣"],
    "a_b _ __x 3.5 3,5 a.b. it's dog's dogs' women’s": ["a_b", "__x", "3.5", "3,5", "a.b", "dog", "dog", "women"],
    "ไทยภาษา ไทย": ["ไทยภาษา", "ไทย"],
    "日本語テスト ひらがな カタカナ 한국어abc": [
        "日",
        "本",
        "語",
        "テスト",
        "ひ",
        "ら",
        "が",
        "な",
        "カタカナ",
        "한국어abc",
    ],
    "\u202fb\u202fc d": ["\u202fb\u202fc", "d"],
    "é\u0301b co\u00adop c\u200bd e\ufefff": ["é\u0301b", "co\u00adop", "c", "d", "e\ufefff"],
    '"a" 5\'8" שלום"ל צ\'': ["5'8", 'שלום"ל', "צ'"],
    "🅰 ™ © ½ ² ① 10°c µm №5 ℃ ㊗ ㋖": ["🅰", "™", "©", "10", "c", "µm", "5", "㊗", "㋖"],
    "𠀀𠀁 b\u2060c 々b": ["𠀀", "𠀁", "b\u2060c", "々b"],
    "1\ufe101 b\u055fc ẞ": ["1\ufe101", "b", "c", "ß"],
    "men's T-shirts, 100% Cotton & (2-Pack) with a logo": ["men", "t", "shirt", "100", "cotton", "2", "pack", "logo"],
}


@pytest.mark.parametrize(("word", "expected"), list(zip(STEMS[::2], STEMS[1::2])))
def test_stems_of_the_paper(word: str, expected: str) -> None:
    assert stem(word) == expected


@pytest.mark.parametrize("text", LUCENE)
def test_terms_as_lucene_gives_them(text: str) -> None:
    assert list(analyze(text)) == LUCENE[text]


def test_words_that_are_too_long_are_cut() -> None:
    assert [len(token) for token in tokens("x" * (2 * MAX_TOKEN + 1))] == [MAX_TOKEN, MAX_TOKEN, 1]
    assert [len(token) for token in tokens("é" * (MAX_TOKEN + 1) + " b")] == [MAX_TOKEN, 1, 1]


@given(st.text(st.sampled_from("abzAB019_.,:;'\"-# \tsS"), max_size=30))
@settings(max_examples=200, deadline=None)
def test_ascii_takes_a_short_cut_to_the_same_words(text: str) -> None:
    assert analysis._ASCII_WORDS(text) == analysis._words()(text)


@given(
    st.text(
        st.one_of(st.sampled_from("ab1'_. \n\u00a0\u2009\u202f\u3000\u200d\u0301👍ת日"), st.characters()), max_size=30
    )
)
@settings(max_examples=200, deadline=None)
def test_terms_do_not_depend_on_what_was_analyzed_before(text: str) -> None:
    assert terms(text) == list(analyze(text))


@pytest.mark.slow
def test_symbols_are_words_as_recorded(parity_data: Path) -> None:
    ranges = json.loads((parity_data / "webshop" / "lucene_symbol_tokens.json").read_text())
    lost = [code for first, last in ranges for code in range(first, last + 1) if not analyze(chr(code))]
    assert len(lost) <= 1  # a digit that was none when Lucene's tables were made
