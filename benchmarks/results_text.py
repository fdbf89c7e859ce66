"""The sentences of the pages of results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operator:
    """name: in tables; what: one or two sentences; page: where it is explained; at: its page of results."""

    name: str
    what: str
    page: str
    at: str


@dataclass(frozen=True)
class Page:
    """at: its name; what: was measured."""

    at: str
    title: str
    what: str


PAGES = (
    Page(
        "gemm_rs",
        "`gemm_rs`",
        "GEMM + ReduceScatter in one kernel, against NCCL with cuBLAS and torch's async-TP.",
    ),
    Page(
        "ag_gemm",
        "`ag_gemm`",
        "AllGather + GEMM in one kernel, against NCCL with cuBLAS and torch's async-TP.",
    ),
    Page(
        "gemm_ar",
        "`gemm_ar` and `all_reduce`",
        "Decoding from CUDA graphs: GEMM + AllReduce, and the AllReduce alone.",
    ),
    Page("gemm", "`gemm` and `quantize`", "Products on one GPU, and quantisation for them."),
    Page(
        "moe",
        "mixtures of experts",
        "Both layers, and routing, against gathers, grouped GEMMs and one-pass sums.",
    ),
    Page("vllm", "vLLM", "Whole models with random weights in vLLM, with and without flux."),
    Page(
        "megatron",
        "Megatron-Core",
        "Transformer layers and whole models of Megatron-Core, stock and on flux.",
    ),
)
_LAYER = "The linear layers of a transformer block, not whole models. Of Mixtral the attention only."
_MOE = "TP slices every expert, EP2 and EP4 give whole experts to ranks; `std` says how uneven loads are."
_FP8 = "Operands are quantised before. Rows name their scales: of tensors, rows and columns, or blocks."
OPERATORS = {
    "gemm_rs": Operator("`gemm_rs`", "GEMM + ReduceScatter.", "gemm_rs.md", "gemm_rs"),
    "gemm_rs_fp8": Operator("`gemm_rs`, fp8", _FP8, "fp8.md", "gemm_rs"),
    "ag_gemm": Operator("`ag_gemm`", "AllGather + GEMM.", "ag_gemm.md", "ag_gemm"),
    "ag_gemm_fp8": Operator("`ag_gemm`, fp8", _FP8, "fp8.md", "ag_gemm"),
    "gemm_ar": Operator("`gemm_ar`", "Weights are not in the L2 cache.", "gemm_ar.md", "gemm_ar"),
    "gemm_ar_fp8": Operator("`gemm_ar`, fp8", _FP8, "fp8.md", "gemm_ar"),
    "gemm_ar_norm": Operator("`gemm_ar` with norm", "With residual and RMSNorm.", "gemm_ar.md", "gemm_ar"),
    "all_reduce": Operator("`all_reduce`", "The AllReduce alone.", "gemm_ar.md", "gemm_ar"),
    "all_reduce_norm": Operator(
        "`all_reduce` with norm", "With residual and RMSNorm.", "gemm_ar.md", "gemm_ar"
    ),
    "gemm": Operator("`gemm`", "Against cuBLAS.", "gemm.md", "gemm"),
    "gemm_fp8": Operator(
        "`gemm`, fp8", f"Against torch's and packages' scaled products. {_FP8}", "fp8.md", "gemm"
    ),
    "quantize_fp8": Operator(
        "`quantize`", "Activations from bf16. The peer is eager torch.", "fp8.md", "gemm"
    ),
    "moe_layer0": Operator("MoE layer 0", f"AllGather of tokens + grouped GEMM. {_MOE}", "moe.md", "moe"),
    "moe_layer1": Operator("MoE layer 1", f"Grouped GEMM + sum + ReduceScatter. {_MOE}", "moe.md", "moe"),
    "moe_layer0_fp8": Operator("MoE layer 0, fp8", _FP8, "fp8.md", "moe"),
    "moe_layer1_fp8": Operator("MoE layer 1, fp8", _FP8, "fp8.md", "moe"),
    "moe_mlp": Operator("MoE, both layers", f"Routing and both layers in one call. {_MOE}", "moe.md", "moe"),
    "moe_route": Operator(
        "MoE routing",
        "Exchange and sort of choices. The peer is NCCL and torch's sort. `hot`: all chose expert 0.",
        "moe.md",
        "moe",
    ),
    "layer_forward": Operator("Linear layers, forward", _LAYER, "megatron.md", "megatron"),
    "layer_training": Operator("Linear layers, training", _LAYER, "megatron.md", "megatron"),
}
HEAD = """\
# Results

The speed of every operator, [measured](benchmarks.md) on GPUs of one host with NVLink multicast off, in bf16
unless a row says fp8. Each row was checked with exact integers before it was timed; the newest measurement
counts. `make results` writes this page and those it links from the files in `benchmarks/results`.

- **over the best without flux**: time of the fastest way that a package or torch offers / time of flux, as
  geometric mean and, in brackets, of the worst row; **bold**: flux is slower.
- **over own parts**: the same against flux's GEMM and collective one after the other, where that was timed.
- **t / floor**: time over the longer of the GEMM alone and the bytes on the link.
- **kernel changed since**: how much of the device code differs now, from the oldest file of the row on.
  "Unequal rests" can be [9 % of error](benchmarks.md#traps).

Whole models: [vLLM](results/vllm.md), [Megatron-Core](results/megatron.md).
"""
CELLS = "In tables: over the best without flux, behind the slash over own parts ([meaning](../results.md)).\n"
VLLM = """\
vLLM's defaults; tokens per second, in brackets over stock. `graph` has CUDA graphs, `eager` not. `stock`
sums with vLLM's own all-reduce, `stock-nccl` with NCCL; `unfused` is without vLLM's fusion of all-reduce
and RMSNorm.
See [vllm.md](../vllm.md).
"""
MODELS = """\
In brackets the time over that of flux's fastest candidate with the same classes. Training: a forward and a
backward pass. *host*: the host set the pace. See [megatron.md](../megatron.md#whole-models).
"""
LOSSES = """\
From the same weights, stock and on flux, in a [picture](../figures/megatron-losses.svg). Roundings differ, so
losses drift apart.
"""
README_HEAD = """\
Measured with NVLink multicast off, bf16, flux beside its baseline in turns:

"""
README_NOTES = """\

[All operators, also where flux is slower](docs/results.md).
"""
