"""FP8Linear: a Linear whose weight and input are e4m3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantattn import ops
from quantattn.arithmetic import decode_fp8, quantize_fp8, quantize_fp8_rows
from quantattn.errors import CheckpointError, FormatError

__all__ = ["FP8Linear", "refuse_invalid_scales"]

_FP8 = torch.float8_e4m3fn
_GRANULARITIES = ("tensor", "channel")
_ACTIVATIONS = ("static", "dynamic", None)


class FP8Linear(nn.Module):
    """y = (x / s_x rounded to e4m3) @ W^T * s_x * s_w + bias, products summed in float32.

    CUDA devices from sm_89 on multiply the codes themselves, where both widths are multiples of 16;
    elsewhere, and where inputs are not quantized, codes are decoded and multiplied as float32.

    `weight` `[out_features, in_features]` e4m3, `weight_scale` `[1]` or `[out_features, 1]` float32
    and, with static activation, `input_scale` `[1]` float32 keep dtype and bits under every cast.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        bias: Whether there is a bias `[out_features]`, in the model's dtype.
        weight_granularity: `tensor` or `channel`.
        activation: `static` (inputs are quantized with `input_scale`), `dynamic` (with a scale a
            token, its largest finite magnitude / 448), or None: inputs are not quantized.
        dtype: The model's dtype, for the bias.
        device: Where the tensors are.

    Raises:
        FormatError: The granularity or the activation is none of these.

    Example:
        >>> layer = FP8Linear(
        ...     64, 32, bias=False, weight_granularity="channel", activation="dynamic"
        ... )
        >>> layer.to(torch.bfloat16).weight.dtype
        torch.float8_e4m3fn
        >>> layer(torch.zeros(3, 64, dtype=torch.bfloat16)).shape
        torch.Size([3, 32])
    """

    bias: Tensor | None
    input_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        weight_granularity: str,
        activation: str | None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, got, known in (
            ("weight_granularity", weight_granularity, _GRANULARITIES),
            ("activation", activation, _ACTIVATIONS),
        ):
            if got not in known:
                raise FormatError(f"{name}: got {got!r}, expected one of {known}")
        self.in_features = in_features
        self.out_features = out_features
        self.activation = activation
        scale_shape = (out_features, 1) if weight_granularity == "channel" else (1,)
        codes = torch.zeros(out_features, in_features, dtype=_FP8, device=device)
        self.weight = _frozen(codes)
        self.weight_scale = _frozen(torch.ones(scale_shape, device=device, dtype=torch.float32))
        one = torch.ones(1, device=device, dtype=torch.float32)
        self.input_scale = _frozen(one) if activation == "static" else None
        self.bias = _frozen(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None

    def forward(self, input: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Quantize the input as the layer's activation says and multiply.

        Args:
            input: `[..., in_features]`, fp32, fp16 or bf16; or e4m3, quantized with `input_scale`
                already (by the attention before this layer).
            out_dtype: dtype of the result; None: that of `input`.

        Raises:
            FormatError: `input` is e4m3 and the layer has no `input_scale`, or `out_dtype` is None.
        """
        codes, scale = self._quantized(input, out_dtype)
        dtype = out_dtype or input.dtype
        if not (codes.dtype is _FP8 and self._multiplies_codes()):
            products = functional.linear(codes.float(), decode_fp8(self.weight, _FP8))
        elif self.activation == "static" and self.weight_scale.numel() == 1 and self.bias is None:
            return self._product(codes, scale, self.weight_scale, dtype)
        else:
            one = torch.ones(1, device=codes.device)
            products = self._product(codes, one, one, torch.float32)
        out = products * scale * self.weight_scale.view(-1)
        out = out if self.bias is None else out + self.bias.float()
        return out.to(dtype)

    def _quantized(self, input: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """The input's codes, or the input where it stays, and the multiplier that dequantizes."""
        if input.dtype is _FP8:
            if self.input_scale is None or out_dtype is None:
                raise FormatError(
                    "input: got e4m3 codes, which need a layer with static activation and an"
                    f" out_dtype; activation is {self.activation!r} and out_dtype {out_dtype}"
                )
            return input, self.input_scale
        if self.activation is None:
            return input, torch.ones(1, device=input.device)
        # Spelled out, the compiler computes it along with what comes before.
        is_spelled = torch.compiler.is_compiling() and self._multiplies_codes()
        if self.input_scale is not None:
            static = quantize_fp8 if is_spelled else ops.static_quant_fp8
            return static(input, self.input_scale, dtype=_FP8), self.input_scale
        rows = input.reshape(-1, self.in_features)
        dynamic = quantize_fp8_rows if is_spelled else ops.dynamic_quant_fp8
        codes, scales = dynamic(rows, dtype=_FP8)
        return codes.view(input.shape), scales.view(*input.shape[:-1], 1)

    def _multiplies_codes(self) -> bool:
        is_aligned = self.in_features % 16 == 0 and self.out_features % 16 == 0
        return is_aligned and _has_fp8_products(self.weight.device)

    def _product(
        self, codes: Tensor, scale: Tensor, weight_scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Multiply codes by W^T and by two scales of one number, with one rounding at the end."""
        rows, columns = codes.reshape(-1, self.in_features), self.weight.t()
        # torch.nn.functional.scaled_mm does not compile in every version of torch.
        product = torch._scaled_mm(rows, columns, scale, weight_scale, out_dtype=dtype)  # noqa: SLF001
        return product.view(*codes.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        kept = {id(t) for t in (self.weight, self.weight_scale, self.input_scale) if t is not None}

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in kept and moved.dtype != tensor.dtype:
                return tensor.to(moved.device)
            return moved

        return super()._apply(move, recurse)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """Sizes and quantization, for `print(model)`."""
        per = "channel" if self.weight_scale.numel() > 1 else "tensor"
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" weight_granularity={per!r}, activation={self.activation!r}"
        )


def refuse_invalid_scales(model: nn.Module, path: str) -> None:
    """Check the scales of a loaded model's FP8 Linears, with one synchronisation for all.

    A weight's scale may be 0 (a channel of zeros); an input's, by which is divided, may not.

    Args:
        model: Any module, with its values.
        path: The checkpoint, for the message.

    Raises:
        CheckpointError: Scales would make outputs NaN or of the wrong sign; each is named.

    Example:
        >>> layer = FP8Linear(4, 2, weight_granularity="tensor", activation="static")
        >>> refuse_invalid_scales(layer, "checkpoint")
    """
    flags: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Linear):
            of_weight, of_input = layer.weight_scale, layer.input_scale
            flags[f"{name}.weight_scale"] = (of_weight.isfinite() & (of_weight >= 0)).all()
            if of_input is not None:
                flags[f"{name}.input_scale"] = (of_input.isfinite() & (of_input > 0)).all()
    valid = torch.stack(list(flags.values())).tolist() if flags else []
    invalid = [name for name, is_valid in zip(flags, valid, strict=True) if not is_valid]
    if invalid:
        raise CheckpointError(
            f"{path}: scales of Linears are not finite and above zero, so the producer did not"
            f" calibrate them: {', '.join(invalid)}; quantize it again",
            place=invalid[0],
        )


def _has_fp8_products(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    device_is = torch.cuda.get_device_properties(device)
    return (device_is.major, device_is.minor) >= (8, 9)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
