"""Which Linears of a checkpoint are FP8, and how: read from what its config declares.

Served are e4m3 weights with one scale a tensor or one an output channel, and inputs that are
quantized with a stored scale, with a scale of each token, or not at all, as declared by
compressed-tensors, ModelOpt, Quark, auto-round and AutoFP8 (`fp8`). The rest is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from quantattn.errors import FormatError
from quantattn.loaders.json_object import JsonObject

__all__ = ["LinearScheme", "LinearSchemes", "read_linear_schemes"]


@dataclass(frozen=True)
class LinearScheme:
    """How one Linear is quantized.

    Attributes:
        per_channel: Whether the weight has one scale an output channel; else one in all.
        activation: `static` (the stored `input_scale`), `dynamic` (one scale a token, computed), or
            None: inputs are not quantized.
    """

    per_channel: bool
    activation: str | None


@dataclass(frozen=True)
class LinearSchemes:
    """The schemes of a model's Linears by name; the first target that matches decides.

    Attributes:
        targets: Pairs of a pattern and its scheme. A pattern is a name, a wildcard, or `re:` and a
            regular expression; `Linear` matches every name.
        ignored: Patterns of names that are not quantized; a name covers what lies under it.

    Example:
        >>> schemes = LinearSchemes((("Linear", LinearScheme(False, "static")),), ("lm_head",))
        >>> schemes.of("lm_head") is None, schemes.of("model.layers.0.mlp.up_proj").activation
        (True, 'static')
    """

    targets: tuple[tuple[str, LinearScheme], ...] = ()
    ignored: tuple[str, ...] = ()

    def of(self, name: str) -> LinearScheme | None:
        """The scheme of the Linear called `name`; None: it is not quantized.

        Raises:
            FormatError: A pattern is no regular expression.
        """
        if any(_matches(name, pattern) for pattern in self.ignored):
            return None
        found = (s for pattern, s in self.targets if pattern == "Linear" or _matches(name, pattern))
        return next(found, None)


def read_linear_schemes(
    config: Mapping[str, object], hf_quant_config: Mapping[str, object] | None = None
) -> LinearSchemes:
    """Read the schemes from a parsed config.json and, where there is one, hf_quant_config.json.

    Raises:
        FormatError: The declared method or scheme is not served; it is named.
        CheckpointError: A field is of the wrong kind.

    Example:
        >>> declared = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        >>> read_linear_schemes({"quantization_config": declared}).of("lm_head")
        LinearScheme(per_channel=False, activation='dynamic')
    """
    outer = JsonObject(config, "config.json")
    declared = outer.child("quantization_config") or outer.child("compression_config")
    method = None if declared is None else declared.text("quant_method")
    if declared is None and hf_quant_config is not None:
        declared = JsonObject(hf_quant_config, "hf_quant_config.json").child("quantization")
        method = "modelopt"
    if declared is None or not declared.data:
        return LinearSchemes()
    if method is None or method not in _READERS:
        known = ", ".join(sorted(_READERS))
        raise FormatError(f"quant_method: got {method!r}, expected one of {known}")
    return _READERS[method](declared)


def _read_groups(declared: JsonObject) -> LinearSchemes:
    """compressed-tensors: groups of targets; a group without weights is about attention."""
    targets = []
    groups = declared.child("config_groups")
    for _, group in groups.children() if groups is not None else ():
        weights, inputs = group.child("weights"), group.child("input_activations")
        if weights is None:
            continue
        strategy = weights.text("strategy") or "tensor"
        if not _is_fp8(weights) or strategy not in ("tensor", "channel"):
            raise _unserved(weights)
        if inputs is not None and not _is_fp8(inputs):
            raise _unserved(inputs)
        scheme = LinearScheme(strategy == "channel", _activation(inputs, "dynamic"))
        targets += [(pattern, scheme) for pattern in group.texts("targets")]
    targets.sort(key=lambda target: target[0] == "Linear")
    return LinearSchemes(tuple(targets), declared.texts("ignore"))


def _read_modelopt(declared: JsonObject) -> LinearSchemes:
    schemes = {
        "FP8": LinearScheme(False, "static"),
        "FP8_PER_CHANNEL_PER_TOKEN": LinearScheme(True, "dynamic"),
    }
    algorithm = declared.text("quant_algo")
    if algorithm is None:
        return LinearSchemes()
    if algorithm not in schemes:
        raise _unserved(declared, "quant_algo")
    ignored = (*declared.texts("ignore"), *declared.texts("exclude_modules"))
    return LinearSchemes((("Linear", schemes[algorithm]),), ignored)


def _read_quark(declared: JsonObject) -> LinearSchemes:
    overrides = declared.child("layer_quant_config")
    settings = dict(overrides.children()) if overrides is not None else {}
    everywhere = declared.child("global_quant_config")
    if everywhere is not None:
        settings["Linear"] = everywhere
    targets = []
    for pattern, setting in settings.items():
        weight, inputs = setting.child("weight"), setting.child("input_tensors")
        if weight is None:
            continue
        granularity = weight.text("qscheme")
        if weight.text("dtype") != "fp8_e4m3" or granularity not in ("per_tensor", "per_channel"):
            raise _unserved(weight)
        if inputs is not None and inputs.text("dtype") != "fp8_e4m3":
            raise _unserved(inputs)
        scheme = LinearScheme(granularity == "per_channel", _activation(inputs, "is_dynamic"))
        targets.append((pattern, scheme))
    return LinearSchemes(tuple(targets), declared.texts("exclude"))


def _read_auto_round(declared: JsonObject) -> LinearSchemes:
    if declared.text("data_type") not in ("fp", "fp8", "fp8_e4m3"):
        raise _unserved(declared, "data_type")
    if declared.count("bits") != 8:
        raise _unserved(declared, "bits")
    if declared.data.get("group_size") not in (-1, 0):
        raise _unserved(declared, "group_size")
    activation = "dynamic" if declared.flag("act_dynamic", default=True) else "static"
    scheme = LinearScheme(
        declared.data.get("group_size") == -1,
        activation if declared.count("act_bits") == 8 else None,
    )
    blocks = declared.data.get("block_name_to_quantize", "model.layers")
    if not isinstance(blocks, str):
        raise declared.error("block_name_to_quantize", "names joined by commas")
    exceptions = declared.child("extra_config")
    found = exceptions.children() if exceptions is not None else ()
    ignored = tuple(name for name, exception in found if exception.count("bits") == 16)
    targets = tuple((f"{block.strip()}.*", scheme) for block in blocks.split(","))
    return LinearSchemes(targets, ignored)


def _read_fp8(declared: JsonObject) -> LinearSchemes:
    if declared.data.get("weight_block_size") is not None:
        raise _unserved(declared, "weight_block_size")
    activation = declared.text("activation_scheme")
    if activation not in ("static", "dynamic"):
        raise _unserved(declared, "activation_scheme")
    ignored = (*declared.texts("ignored_layers"), *declared.texts("modules_to_not_convert"))
    return LinearSchemes((("Linear", LinearScheme(False, activation)),), ignored)


_READERS: dict[str, Callable[[JsonObject], LinearSchemes]] = {
    "auto-round": _read_auto_round,
    "compressed-tensors": _read_groups,
    "fp8": _read_fp8,
    "modelopt": _read_modelopt,
    "quark": _read_quark,
}


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern.removeprefix("re:"), name) is not None
        except re.error as error:
            raise FormatError(
                f"quantization config: {pattern!r} is no regular expression: {error}"
            ) from None
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def _is_fp8(arguments: JsonObject) -> bool:
    return arguments.count("num_bits") == 8 and arguments.text("type") == "float"


def _activation(inputs: JsonObject | None, dynamic: str) -> str | None:
    if inputs is None:
        return None
    return "dynamic" if inputs.data.get(dynamic) else "static"


def _unserved(section: JsonObject, key: str | None = None) -> FormatError:
    wanted = _SAID if key is None else (key,)
    said = {name: section.data[name] for name in wanted if name in section.data}
    return FormatError(
        f"{section.file}: {section.path} declares {said} for Linears; this model runs e4m3 weights"
        " with one scale a tensor or an output channel"
    )


_SAID = ("num_bits", "type", "strategy", "dtype", "qscheme")
