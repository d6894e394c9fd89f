"""Every way of splitting text that `tokenizer.ggml.pre` can name, beside Python's own `re` and beside pieces written
by hand.
"""

from __future__ import annotations

import pytest

from foretoken.text.gguf_pre_tokenizers import ENCODERS, PRE_TOKENIZERS, PreTokenizer
from foretoken.text.gguf_tokenizer import split_of
from tests.helpers.slow_tokenizers import split

# No characters on which Oniguruma and Python differ: U+001C to U+001F (white space here and not there), and long s,
# which `(?i:s)` takes here only.
HOSTILE = (
    "",
    " ",
    "   ",
    "\n",
    "a\n",
    " \n \n\n  x",
    "\r\n\r\ny \r",
    "\t\tif (x <= 12345678 && y == 1.5e-10) {\n\t\treturn a->b[0];\n\t}",
    "I'm WE'LL they'd he'S o'clock 'tis 'd '",
    "camelCaseHTTPServer2024XMLparser UPPER lower Ünïcode ÀÉ",
    "na\u00efve nai\u0308ve e\u0301e\u0301 \u0301\u0301",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 123\u53f7 abc\u6f22\u5b57def",
    "\u3053\u3093\u306b\u3061\u306f\u30ab\u30bf\u30ab\u30ca \ud55c\uad6d\uc5b4 \uacf5\ubd80 \u3131\u3134 \u3105\u3106",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u0645\u0631\u062d\u0628\u0627\u060c \u0967\u0968\u0969\u0664\u0665",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0393\u03b5\u03b9\u03ac \u10d2\u10d0\u10db \U00010400\U00010428",
    "\U0001f999\U0001f469\u200d\U0001f4bb\u2764\ufe0f \u20ac5 \u00bd\u00b2 \u2160\u2161",
    "\u00a0\u2003x\u3000\u3000y\u2028z\u0085w",
    "1 12 123 1234 12345 123456 1234567a a1234567 1,234,567.89 12a345b6",
    "!!! ... ?? --- /// \\\\ `code` ~~ ^^ || $x + <y> = \"q\" 'r' #c @d _e_f",
    "<sentinel:12> IMGIMGABCZ IMGIMGJZ <|im_start|>user",
    "line one   \nline two\t \n\n\n    four  ",
    " " * 700 + "x" + " " * 5,
    "\x00\x07\x7f\ufeff\ufffd\ue000",
)
DISTINCT = {pre: name for name, pre in reversed(PRE_TOKENIZERS.items()) if pre.byte_level}


def pieces(text: str, pre: PreTokenizer) -> list[str]:
    found = split_of(pre).pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in found]


@pytest.mark.parametrize("pre", DISTINCT, ids=list(DISTINCT.values()))
def test_texts_are_split_as_another_engine_splits_them(pre: PreTokenizer) -> None:
    for text in HOSTILE:
        found = pieces(text, pre)
        assert "".join(found) == text
        assert found == split(text, pre.splits)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'm HE'S 12345  ok\n\n x", "I|'m| HE|'|S| 12345| | ok|\n\n| x"),
        ("smollm", "a 12 b", "a| |1|2| b"),
        ("llama-bpe", "HE'S 12345  ok!\n\n x", "HE|'S| |123|45| | ok|!\n\n| x"),
        ("qwen2", "(x) 123", "(x|)| |1|2|3"),
        ("qwen35", "e\u0301a e\u0301", "e\u0301a| e\u0301"),
        ("qwen2", "e\u0301a", "e|\u0301a"),
        ("gpt-4o", "camelCase XMLParser's a/\n", "camel|Case| XMLParser's| a|/\n"),
        ("tekken", "camelCase12's", "camel|Case|1|2|'s"),
        ("kimi-k2", "abc\u6f22\u5b57\u304b 1234", "abc|\u6f22\u5b57|\u304b| |123|4"),
        ("superbpe", "so many words 1234567 here", "so many words |1|234|567| here"),
        ("tiny_aya", "1234567 12a", "1|234|567| |12|a"),
        ("afmoe", "1234567 12345a", "1|234|567| |12|345|a"),
        ("deepseek-v3", "f(x) \u4f60\u597d12345", "f|(x|)| |\u4f60\u597d|123|45"),
        ("deepseek-coder", "x\r\n 12", "x|\r|\n| |1|2"),
        ("falcon", "x=1234; y", "x|=|123|4|;| y"),
        ("bloom", "Hi there, you.", "Hi| there|,| you|."),
        ("viking", "a 12, b", "a| |1|2|,| b"),
        ("jais-2", "a" + " " * 13 + "b", "a" + "|" + " " * 8 + "|" + " " * 4 + "| b"),
        ("exaone-moe", "two words 12\n\n", "two words| |1|2|\n\n"),
        ("laguna", "a\n\nb", "a|\n\n|b"),
        ("chameleon", "a  b\t<sentinel:12>", "a|  |b|\t|<|sentinel|:|1|2|>"),
        ("default", "a=12345", "a|=|123|45"),
    ],
)
def test_pieces_by_hand(name: str, text: str, expected: str) -> None:
    assert pieces(text, PRE_TOKENIZERS[name]) == expected.split("|")


def test_every_name_of_llama_cpp_is_read_or_refused() -> None:
    """The names in llama.cpp's `llama_vocab::impl::load`, release of llama-cpp-python 0.3.36."""
    known = (
        "default minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano "
        "deepseek-llm deepseek-coder deepseek-v3 spark2_5 youtu falcon mpt starcoder gpt-2 phi-2 jina-es jina-de "
        "gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jais-2 gemma4 granite-embed-multi-311m "
        "sarvam-moe jina-v1-en jina-v2-code roberta-bpe whitespace refact command-r qwen2 deepseek-r1-qwen kormo "
        "f2llmv2 qwen35 stablelm2 olmo dbrx smaug-bpe poro-chat chatglm-bpe glm4 glm5 viking jais tekken smollm "
        "codeshell bloom gpt3-finnish exaone exaone4 exaone-moe chameleon minerva-7b megrez gpt-4o llama4 kanana2 "
        "talkie granite-embed-multi-97m tiny_aya cohere2moe superbpe trillion granite-docling bailingmoe "
        "bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm kimi-k2 ufakzeka grok-2 afmoe "
        "laguna minimax-m2 solar-open mellum2"
    )
    assert set(known.split()) == {*PRE_TOKENIZERS, *ENCODERS}
