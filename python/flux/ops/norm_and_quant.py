"""What follows a sum over ranks in the same call: RMSNorm, and quantisation of the normalised rows."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from flux import _deprecated
from flux._memory import wide_type
from flux.calls import checks
from flux.comm import repeat
from flux.comm.workspace import Same
from flux.fp8.products import by_rows
from flux.fp8.scales import OLD_WORDS, Scales
from flux.ops import quantize as quantising
from flux.plan.choose import takes

Tensor = torch.Tensor
Quant = Literal["tensor", "row", "group128"]
QUANTS = ("tensor", "row", "group128")
NAMES = ("quant", "quant_scale", "ue8m0", "return_norm")  # of arguments, in the order of End
_E4M3 = torch.float8_e4m3fn


class End(NamedTuple):
    """The arguments of flux.gemm_ar that say what follows the sum; without norm_weight nothing does."""

    norm_weight: Tensor | None = None
    eps: float = 0.0
    quant: str | None = None
    quant_scale: Tensor | None = None
    ue8m0: bool = False
    return_norm: bool = False

    def check(self, op: str, n: int, x: Tensor, scales: Scales | None = None) -> None:
        """Checks the arguments for a sum [..., n]."""
        if self.norm_weight is not None:
            checks.like(op, "norm_weight", self.norm_weight, [n], x, scales)
            if not self.eps >= 0.0:
                checks.fail(op, "eps", "a number that is not negative", self.eps)
        if self.quant is not None:
            if self.quant not in QUANTS:
                checks.fail(op, "quant", f"None or one of {', '.join(QUANTS)}", repr(self.quant))
            quantising.checked(op, x, self.quant, self.quant_scale, self.ue8m0, _E4M3, "quant_scale")

    def by_name(self) -> dict[str, Any]:
        """The arguments, those of a quantisation only if there is one, for flux.comm.repeat."""
        return dict(zip(self._fields if self.quant else self._fields[:2], self, strict=False))

    def same(self) -> Same:
        facts: dict[str, Any] = {"norm_weight": self.norm_weight}
        if self.norm_weight is not None:
            facts["eps"] = self.eps
        if self.quant is not None:
            facts |= {"quant": self.quant, "quant_scale": self.quant_scale, "ue8m0": self.ue8m0}
        return facts

    def of(self, total: Tensor, made: Made | None = None) -> Any:
        """The result of a call: the sum alone, or what a kernel has made of it, then the sum."""
        if self.norm_weight is None:
            return total
        made = made or Made(row_norm(total, self.norm_weight, self.eps))
        normalised = made.normalised.view(total.shape)
        if self.quant is None:
            return normalised, total
        q, scale = made.quantised or quantising.empty(total, self.quant, _E4M3)
        if not made.quantised:
            how = (self.quant, self.quant_scale, self.ue8m0, _E4M3)
            quantising.run(quantising.Call(normalised, *how, (q, scale)))
        q, scale = q.view(total.shape), scale.view(quantising.scales_shape(total, self.quant))
        return (q, scale, total, normalised) if self.return_norm else (q, scale, total)

    def fake(self, total: Tensor) -> Any:
        if self.quant is None:
            return torch.empty_like(total), total
        found = [*quantising.empty(total, self.quant, _E4M3), total]
        return [*found, torch.empty_like(total)] if self.return_norm else found

    def in_kernel(self, op: str, total: Tensor) -> Made | None:
        """Memory for what a kernel makes of the sum [m, n], without what it cannot make."""
        if self.norm_weight is None:
            return None
        if self.quant is None or not takes(op, "q"):
            return Made(torch.empty_like(total))
        q, scale = quantising.empty(total, self.quant, _E4M3)
        parts = quantising.scratch(q, self.quant, self.quant_scale)
        return Made(torch.empty_like(total), (q, scale), parts)

    def for_kernel(self, made: Made | None) -> dict[str, Any]:
        if made is None or self.quant is None or not made.quantised:
            return {}
        q, scale = made.quantised
        return {
            "q": q,
            "q_scale": scale if self.quant == "group128" else scale.flatten(),
            "granularity": quantising.QUANTS.index(self.quant),
            "ue8m0": self.ue8m0,
            "quant_scale": self.quant_scale,
            "parts": made.parts,
        }

    def by_kernel_name(self, out: Tensor, made: Made | None) -> dict[str, Tensor] | None:
        """The results of a call, in their order, by the kernel's names, for front.remember. out: the sum."""
        if made is None:
            return None
        names = ("out", "residual_out") if self.quant is None else ("q", "q_scale", "residual_out", "out")
        return dict(zip(names, self.of(out, made), strict=False))

    def follows(self, recipe: repeat.Recipe, out: Tensor, found: Any) -> None:
        """As `remembered`, for a call whose launches end with the sum, and torch makes `found` of it."""
        if self.norm_weight is None:
            recipe.returns(out, "out")
            return
        made = [each for each in found if each is not out]
        numbers = {id(each): recipe.returns(each) for each in found}
        _, eps, quant, _, ue8m0, return_norm = self

        def normalise(total: Tensor, norm_weight: Tensor) -> Tensor:
            return row_norm(total, norm_weight, eps)

        def quantise(total: Tensor, norm_weight: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
            q, scales, _, *norm = End(norm_weight, eps, quant, scale, ue8m0, return_norm).of(total)
            return q, scales, *norm

        operands = [numbers[id(out)], recipe.number("norm_weight")]
        if quant is None:
            recipe.made_by(normalise, operands, made)
        else:
            recipe.made_by(quantise, [*operands, recipe.number("quant_scale")], made)


class Made(NamedTuple):
    """What a kernel makes of a sum: normalised rows, maybe fp8 and scales, with scratch memory `parts`."""

    normalised: Tensor
    quantised: tuple[Tensor, Tensor] | tuple[()] = ()
    parts: Tensor | None = None


NONE = End()


def arguments(op: str, quant: Any, quant_scale: Any, ue8m0: Any, return_norm: Any) -> tuple[Any, ...]:
    """Arguments of a torch operator: none for a call that does not quantise."""
    if quant is None and quant_scale is None and ue8m0 is False and return_norm is False:
        return ()
    if quant == "token":
        quant = _deprecated.word(op, "quant", quant, OLD_WORDS)
    return quant, quant_scale, ue8m0, return_norm


def check(op: str, norm_weight: Tensor | None, out: Tensor | None, quantised: tuple[Any, ...]) -> None:
    """Checks that arguments of a public function go together."""
    if norm_weight is not None and out is not None:
        several = "several tensors" if quantised else "two tensors"
        checks.fail(op, "out", f"None with norm_weight, which returns {several}", "a tensor")
    if quantised and quantised[0] is None:
        _, quant_scale, ue8m0, _ = quantised
        name = "quant_scale" if quant_scale is not None else "ue8m0" if ue8m0 else "return_norm"
        checks.fail(op, name, "the default without quant", "another value")
    if quantised and norm_weight is None:
        checks.fail(op, "quant", "None without norm_weight (flux.quantize quantises a sum)", quantised[0])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x²) + eps) * weight of rows, in fp32 (float64: in float64), rounded once."""
    wide = x.to(wide_type(x.dtype))
    squares = wide.square().view(wide.shape[:-1].numel(), wide.shape[-1])
    mean = by_rows(lambda rows: rows.mean(-1, keepdim=True), squares)
    scale = torch.rsqrt(mean.view(*wide.shape[:-1], 1) + eps)
    return (wide * scale * weight).to(x.dtype)


def row_norm(total: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm by the fastest way on total's device."""
    if total.is_cuda:  # one kernel there; the same sum in fp32 and the same one rounding
        return torch.nn.functional.rms_norm(total, weight.shape, weight, eps)
    return rms_norm(total, weight, eps)
