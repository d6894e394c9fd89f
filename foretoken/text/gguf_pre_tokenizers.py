"""How byte-level BPE vocabularies split text before merging, by the name in `tokenizer.ggml.pre`.

The names, and what each means, are llama.cpp's (`llama-vocab.cpp`, `llama_vocab::impl::load`). The expressions are
those of the models' own `tokenizer.json`, in the syntax of Oniguruma, the engine of the `tokenizers` library; where
llama.cpp approximates one (its engine has no `(?i:)`, no possessive quantifiers, no classes of letter case), the
original stands here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PreTokenizer:
    """Expressions in turn, each on the pieces of the one before: matches are pieces, and the text between them."""

    splits: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is that token, whatever the merges make of it
    add_bos: bool = False  # unless the file says otherwise
    byte_level: bool = True  # False: tokens are text with a mark for the space, and `<0xFF>` for what is left


def _either(*parts: str) -> str:
    return "|".join(parts)


_DIGIT, _THREE_DIGITS, _DIGITS = r"\p{N}", r"\p{N}{1,3}", r"\p{N}+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LINE_ENDS = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"

_GPT2 = _either(r"'s|'t|'re|'ve|'m|'ll|'d", r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", _SPACES)
_LLAMA3 = _either(_CONTRACTION, _WORD, _THREE_DIGITS, _SYMBOLS, _LINE_ENDS, _SPACES)
_QWEN2 = _either(_CONTRACTION, _WORD, _DIGIT, _SYMBOLS, _LINE_ENDS, _SPACES)
_QWEN35 = _either(
    _CONTRACTION, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", _DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _LINE_ENDS, _SPACES
)


def _cased_words(ending: str, but: str = "") -> str:
    """Words cut where a lower-case letter meets an upper-case one, `but` characters left out."""
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    return _either(
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ending}", rf"[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}"
    )


_TEKKEN = _either(_cased_words(""), _DIGIT, _SYMBOLS_SLASH, _LINE_ENDS, _SPACES)
_GPT4O = _either(_cased_words(f"{_CONTRACTION}?"), _THREE_DIGITS, _SYMBOLS_SLASH, _LINE_ENDS, _SPACES)
_YOUTU = _either(_cased_words(f"{_CONTRACTION}?"), _DIGIT, _SYMBOLS_SLASH, _LINE_ENDS, _SPACES)
_KIMI = _either(
    r"[\p{Han}]+", _cased_words(f"{_CONTRACTION}?", but=r"&&[^\p{Han}]"), _THREE_DIGITS, _SYMBOLS, _LINE_ENDS, _SPACES
)
_JAIS2 = _either(
    _CONTRACTION,
    _WORD,
    _THREE_DIGITS,
    _SYMBOLS,
    _LINE_ENDS,
    *(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)),
    r"\s{1,2}(?!\S)",
    r"\s{1}",
)
_BAILING = _either(
    r"'(?i:[sdmt]|ll|ve|re)", r"[^\r\n\p{L}\p{N}]?+\p{L}+", _DIGIT, r" ?[^\s\p{L}\p{N}]++[\r\n]*", r"\s*[\r\n]", _SPACES
)
_SEED = _either(_CONTRACTION, _WORD, r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+", _LINE_ENDS, _SPACES)
_UFAKZEKA = _either(_WORD, _DIGIT, _SYMBOLS, _LINE_ENDS, _SPACES)
_EXAONE_MOE = _either(
    _CONTRACTION,
    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
    _DIGIT,
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
    r"\s*[\r\n]",
    _SPACES,
)
_MINICPM5 = _either(_CONTRACTION, _WORD, _DIGITS, _SYMBOLS, _LINE_ENDS, _SPACES)
_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = _either(_ASCII_WORD, _MARKED_WORD, r" ?[\p{P}\p{S}]+[\r\n]*", _LINE_ENDS, _SPACES)
_SPARK = _either(_ASCII_WORD, _MARKED_WORD, r" ?[\p{P}\p{S}]+", r"[\r\n]", _SPACES)
_CHINESE_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CHINESE_KOREAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Digits in groups of three, counted from the right: where a word ends, and inside a run of digits.
_GROUPED_DIGITS = r"\d{1,3}(?=(?:\d{3})*\b)"
_BY_THREES = r"(?=(?:\p{N}{3})+\z)"
_LINES = r"[^\n]+|[\n]+"
_AFMOE_SCRIPTS = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    r"\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    r"[\uac00-\ud7a3\u3131-\u318e]+"
    r"|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    r"|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
# Letters with case, as DeepSeek LLM lists them.
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    r"\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    r"\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    r"\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    r"\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    r"\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    r"\uff41-\uff5a\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}]+"
)
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"

_PLAIN = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((_DIGIT, _GPT2))
_LLAMA3_MERGED = PreTokenizer((_LLAMA3,))
_LLAMA3_WHOLE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer((_QWEN2,))
_O200K = PreTokenizer((_GPT4O,))
_FALCON_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, _DIGITS, "[0-9][0-9][0-9]"))
_DEEPSEEK = PreTokenizer((_THREE_DIGITS, _CHINESE_KANA, _DEEPSEEK3))
_MARKED_SPACES = PreTokenizer((), byte_level=False)  # the merges run over whole lines and their ends
_GEMMA4 = replace(_MARKED_SPACES, add_bos=True)
_TINY_AYA = PreTokenizer((_GROUPED_DIGITS, _GPT4O))
_BAILING_MOE = PreTokenizer((_BAILING,))
_CHATGLM = PreTokenizer((_LLAMA3,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        _LLAMA3_WHOLE,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3_MERGED),
    "chatglm-bpe": _CHATGLM,
    **dict.fromkeys(("glm4", "glm5"), replace(_CHATGLM, ignore_merges=True)),
    "jais-2": PreTokenizer((_JAIS2,)),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, r"\s+$", _CHINESE_KOREAN, _DIGITS)
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_KOREAN, _DIGIT)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK),
    "spark2_5": PreTokenizer((_THREE_DIGITS, _CHINESE_KANA, _SPARK, _DIGIT)),
    "youtu": PreTokenizer((_YOUTU_SCRIPTS, _YOUTU), ignore_merges=True),
    "falcon": PreTokenizer((_FALCON_PUNCTUATION, _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"), _PLAIN),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "modern-bert"), _PLAIN),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), _PLAIN),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _QWEN),
    "qwen35": PreTokenizer((_QWEN35,)),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, _DIGIT)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            _DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _O200K),
    "granite-embed-multi-97m": replace(_O200K, ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _TINY_AYA),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "superbpe": PreTokenizer((_DIGITS, r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING_MOE),
    "seed-coder": PreTokenizer((_SEED,)),
    "ufakzeka": PreTokenizer((_UFAKZEKA,)),
    "afmoe": PreTokenizer((_DIGITS, _BY_THREES, _AFMOE_SCRIPTS, _DEEPSEEK3)),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "minicpm5": PreTokenizer((_THREE_DIGITS, _MINICPM5), ignore_merges=True),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), _GEMMA4),
    "sarvam-moe": _MARKED_SPACES,
}
# Names whose models encode text for a search and write none.
ENCODERS = ("jina-v1-en", "jina-v2-code", "roberta-bpe", "whitespace")
