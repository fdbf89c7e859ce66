"""The sentences of docs/results.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operator:
    """name: in tables; what: one or two sentences; page: where it is explained."""

    name: str
    what: str
    page: str


_LAYER = "The linear layers of a transformer block of Megatron-Core. Of Mixtral the attention only."
_MOE = "TP slices every expert, EP2 and EP4 give whole experts to ranks; `std` says how uneven loads are."
_FP8 = "Operands are quantised before. Rows name their scales: of tensors, rows and columns, or blocks."
_FUSED = "Fused, with fp8 operands. Peers:"
OPERATORS = {
    "gemm_rs": Operator("`gemm_rs`", "GEMM + ReduceScatter in one kernel.", "gemm_rs.md"),
    "ag_gemm": Operator("`ag_gemm`", "AllGather + GEMM in one kernel.", "ag_gemm.md"),
    "gemm_ar": Operator(
        "`gemm_ar`",
        "GEMM + AllReduce for decoding, from CUDA graphs. Weights are not in the L2 cache.",
        "gemm_ar.md",
    ),
    "gemm_ar_norm": Operator(
        "`gemm_ar` with norm",
        "GEMM + AllReduce + residual + RMSNorm. One of the peers is `flux.gemm_ar`, then torch's norm.",
        "gemm_ar.md",
    ),
    "all_reduce": Operator("`all_reduce`", "The AllReduce alone, from CUDA graphs.", "gemm_ar.md"),
    "all_reduce_norm": Operator(
        "`all_reduce` with norm",
        "AllReduce + residual + RMSNorm. One of the peers is `flux.all_reduce`, then torch's norm.",
        "gemm_ar.md",
    ),
    "moe_layer0": Operator(
        "MoE layer 0", f"AllGather of tokens + grouped GEMM: `flux.moe.ag_scatter_gemm`. {_MOE}", "moe.md"
    ),
    "moe_layer1": Operator(
        "MoE layer 1",
        f"Grouped GEMM + sum over a token's experts + ReduceScatter: `flux.moe.gemm_gather_rs`. {_MOE}",
        "moe.md",
    ),
    "moe_mlp": Operator(
        "MoE, both layers", f"Routing and both layers with SwiGLU in one call. {_MOE}", "moe.md"
    ),
    "moe_route": Operator(
        "MoE routing",
        "Exchange and sort of the experts that tokens chose: `flux.moe.route`. `hot`: all chose expert 0.",
        "moe.md",
    ),
    "gemm": Operator(
        "`gemm`", "The GEMM alone on one GPU, against cuBLAS, with the shapes of one of 4 ranks.", "gemm.md"
    ),
    "gemm_fp8": Operator(
        "`gemm`, fp8",
        "The GEMM of fp8 operands. Peers: torch's and packages' scaled products, bf16. " + _FP8,
        "fp8.md",
    ),
    "gemm_rs_fp8": Operator("`gemm_rs`, fp8", f"{_FUSED} scaled products and NCCL, bf16. {_FP8}", "fp8.md"),
    "ag_gemm_fp8": Operator("`ag_gemm`, fp8", f"{_FUSED} NCCL and scaled products, bf16. {_FP8}", "fp8.md"),
    "gemm_ar_fp8": Operator("`gemm_ar`, fp8", f"{_FUSED} scaled products and sums, bf16. {_FP8}", "fp8.md"),
    "moe_layer0_fp8": Operator("MoE layer 0, fp8", f"As in bf16, which is a peer. {_FP8}", "fp8.md"),
    "moe_layer1_fp8": Operator("MoE layer 1, fp8", f"As in bf16, which is a peer. {_FP8}", "fp8.md"),
    "quantize_fp8": Operator("`quantize`", "Activations from bf16. Scales: of tensor, row, block.", "fp8.md"),
    "layer_forward": Operator("Megatron, forward", _LAYER, "megatron.md"),
    "layer_training": Operator("Megatron, training", f"{_LAYER} Forward and backward.", "megatron.md"),
}
HEAD = """\
# Results

`make results` writes this page from the files in `benchmarks/results`. Do not edit it.
[benchmarks.md](benchmarks.md) says how the files are measured, and what the peers are.

All rows ran on GPUs of one host, without NVLink multicast; the files of a table name the GPU. Operands are in
bf16, unless an operator says fp8. Each row was checked before it was timed.

| word | meaning |
|---|---|
| speed-up | time of the best peer / time of flux; of many rows the geometric mean; **bold**: flux is slower |
| best peer | of each row, the fastest way to do the same without flux |
| worst | the row with the smallest speed-up |
| bar | what rows, geometric mean and time / floor [must reach](benchmarks.md#the-bar) |
| host µs | what an eager call cost the host at that commit, least to most |
| commit | what was measured; the link leads to the file |
| older kernel (8 %) | 8 % of the lines of the kernel's source changed since, not counting comments |
| unequal rests | some candidates [rested longer](benchmarks.md#traps) before their turn: up to 9 % of error |
| cut off | the run's time was up: rows are missing |

The summary has the newest measurement that covers the whole suite, or most of it.
A newer one that covers less has a table too.
"""
VLLM = """\
Tokens per second with and without flux, in brackets over stock. `graph` has CUDA graphs, `eager` not.
`stock` sums with vLLM's own all-reduce, `stock-nccl` with NCCL; `unfused` is without vLLM's fusion of
all-reduce and RMSNorm. An engine without numbers was not up in time. Requests that arrive, so many in a
second, wait for their first token and for each further one. See [vllm.md](vllm.md#throughput).
"""
MODELS = """\
Whole models of Megatron-Core, in brackets the time over that of flux's fastest candidate with the same
classes. Training: a forward and a backward pass. `grouped GEMM`: torch's, where Megatron-Core has
one GEMM for each expert. CUDA graph: the step is replayed from one, which stock experts do not allow.
*host*: the host set the pace. See [megatron.md](megatron.md#whole-models).
"""
LOSSES = """\
Megatron-Core from the same weights, stock and on flux, in a [picture](figures/megatron-losses.svg).
Roundings differ, so losses drift apart. See [megatron.md](megatron.md).
"""
README_HEAD = """\
Speed-up over the best peer: geometric mean, and the worst row in brackets. H200, bf16. **Bold** is slower.

"""
README_NOTES = """\

¹ The kernel changed after the measurement. ² Candidates rested for different times. ³ Not the whole suite.
⁴ One GPU, with the shapes of one of 4 ranks.

All rows, their files, and what a call costs the host: [docs/results.md](docs/results.md).
"""
