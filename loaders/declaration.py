"""What a checkpoint's JSON files say it quantized: the KV cache, the query, P, and the Linears.

Files and sections are asked in the order in which engines trust them. Nothing here looks at
tensors: a checkpoint may hold scales and declare none (a plain ModelOpt state dict), and the plan
decides on that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from quantattn.errors import Problem
from quantattn.loaders.geometry import Geometry, decoder_config, read_geometry
from quantattn.loaders.json_object import JsonObject
from quantattn.loaders.kv_scheme import KvScheme, attention_group, read_kv_scheme
from quantattn.loaders.values import ReadContext

__all__ = ["DECLARATION_FILES", "Declaration", "read_declaration"]

DECLARATION_FILES = (
    "config.json",
    "hf_quant_config.json",
    "quantization_config.json",
    "params.json",
    "quant_model_description.json",
)
"""The files that `read_declaration` takes, by the names they have in a checkpoint's folder."""

_IGNORE_LISTS = ("ignore", "ignored_layers", "exclude_modules", "exclude", "modules_to_not_convert")
# Locations of SpinQuant's R3, after which K's scales are those of a rotated K.
_ROTATED_LOCATIONS = frozenset({"q_attn", "k_cache"})


@dataclass(frozen=True)
class Declaration:
    """What a checkpoint says it quantized.

    Attributes:
        method: The quantization method of the first section that is there; None: nothing quantized.
        producer: Who wrote the checkpoint, with its version where that is said.
        kv_dtype: `fp8_e4m3`, `int8`, `int4`, `nvfp4`, or the producer's own word; None: no
            quantized KV cache is declared.
        strategy: `tensor`, `head`, or the producer's own word; None like `kv_dtype`.
        dynamic: Whether KV scales are computed at run time, so that the checkpoint holds none.
        symmetric: Whether the KV cache stores zero as zero.
        kv_measured: `pre_rope` or `post_rope`, where Quark observed K; None: not said.
        source: File and path that declare the KV cache.
        attention_quantized: Whether the query is declared quantized.
        prob_quantized: Whether P is declared quantized.
        linear_outputs_quantized: Whether outputs of Linears are, so that `k_proj.output_scale` is
            theirs.
        linear_activations: `static` or `dynamic` scales of Linear inputs; None: not said.
        linear_ignored: Patterns of Linears left unquantized.
        unsupported: Everything declared that no layer of quantattn can serve, each by name.
        geometry: The shape of the model's attention.
    """

    method: str | None = None
    producer: str | None = None
    kv_dtype: str | None = None
    strategy: str | None = None
    dynamic: bool = False
    symmetric: bool = True
    kv_measured: str | None = None
    source: str | None = None
    attention_quantized: bool = False
    prob_quantized: bool = False
    linear_outputs_quantized: bool = False
    linear_activations: str | None = None
    linear_ignored: tuple[str, ...] = ()
    unsupported: tuple[Problem, ...] = ()
    geometry: Geometry = field(default_factory=Geometry)

    def read_context(self) -> ReadContext:
        """What the reading of a key depends on, as far as the checkpoint itself says it."""
        geometry = self.geometry
        layers = geometry.attention_layers
        return ReadContext(
            kv=self.kv_dtype,
            method=self.method,
            num_layers=geometry.num_layers,
            num_heads=geometry.num_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            is_mla=geometry.is_mla,
            shared_layers=frozenset(geometry.kv_shared),
            attention_layers=None if layers is None else frozenset(layers),
            linear_outputs_quantized=self.linear_outputs_quantized,
        )

    def to_json(self) -> dict[str, object]:
        """The declaration as JSON types."""
        shared = {str(layer): target for layer, target in self.geometry.kv_shared.items()}
        return {**asdict(self), "geometry": {**asdict(self.geometry), "kv_shared": shared}}


@dataclass(frozen=True)
class _Section:
    """One place that states a quantization, with the method that its place implies."""

    method: str | None
    content: JsonObject


def read_declaration(files: Mapping[str, Mapping[str, object] | None]) -> Declaration:
    """Read what a checkpoint declares.

    Args:
        files: Parsed content of the `DECLARATION_FILES`; None, or left out: there is no such file.

    Raises:
        CheckpointError: A member has a wrong type; it names the file and the path in it.

    Example:
        >>> scheme = {"type": "float", "num_bits": 8, "strategy": "attn_head"}
        >>> section = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
        >>> declared = read_declaration({"config.json": {"quantization_config": section}})
        >>> declared.kv_dtype, declared.strategy, declared.source
        ('fp8_e4m3', 'head', 'config.json: quantization_config.kv_cache_scheme')
    """
    objects = {
        name: JsonObject(content, name) for name in files if (content := files[name]) is not None
    }
    sections = list(_sections(objects))
    schemes = [scheme for it in sections if (scheme := read_kv_scheme(it.content)) is not None]
    scheme = schemes[0] if schemes else None
    contents = [it.content for it in sections]
    shape = objects.get("config.json", objects.get("params.json"))
    return Declaration(
        method=sections[0].method if sections else None,
        producer=_producer(sections, objects.get("hf_quant_config.json")),
        kv_dtype=scheme.dtype if scheme else None,
        strategy=scheme.strategy if scheme else None,
        dynamic=scheme.dynamic if scheme else False,
        symmetric=scheme.symmetric if scheme else True,
        kv_measured=_kv_measured(sections) if scheme else None,
        source=scheme.source if scheme else None,
        attention_quantized=any(_quantizes_query(content) for content in contents),
        prob_quantized=any(it.child("softmax_quant_spec") is not None for it in contents),
        linear_outputs_quantized=any(_quantizes_linear_outputs(it) for it in contents),
        linear_activations=next(filter(None, map(_linear_activations, contents)), None),
        linear_ignored=_linear_ignored(contents),
        unsupported=(*_scheme_problems(schemes), *_rotation_problems(contents)),
        geometry=Geometry() if shape is None else read_geometry(shape),
    )


def _sections(objects: Mapping[str, JsonObject]) -> Iterator[_Section]:
    """Every section that is there, the one that rules first."""
    config = objects.get("config.json")
    if config is not None:
        decoder = decoder_config(config)
        for holder in (config,) if decoder is config else (config, decoder):
            yield from _section(holder, "quantization_config", None)
        yield from _section(config, "compression_config", "compressed-tensors")
    if (hf_quant := objects.get("hf_quant_config.json")) is not None:
        yield from _section(hf_quant, "quantization", "modelopt")
    if (auto_round := objects.get("quantization_config.json")) is not None:
        yield _Section(auto_round.text("quant_method"), auto_round)
    if (params := objects.get("params.json")) is not None:
        yield from _section(params, "quantization", "mistral")
    trtllm = None if config is None else config.data.get("quantization")
    if config is not None and isinstance(trtllm, dict) and "kv_cache_quant_algo" in trtllm:
        yield from _section(config, "quantization", "trtllm")
    if (description := objects.get("quant_model_description.json")) is not None:
        yield _Section("ascend", description)


def _section(holder: JsonObject, key: str, method: str | None) -> Iterator[_Section]:
    content = holder.child(key)
    if content is None:
        return
    method = content.text("quant_method") or method
    nested = (
        None if isinstance(content.data.get("quantization"), str) else content.child("quantization")
    )
    yield _Section(method, content if nested is None else nested)


def _producer(sections: list[_Section], hf_quant: JsonObject | None) -> str | None:
    for holder in (*(it.content for it in sections), *([hf_quant] if hf_quant else [])):
        producer = holder.data.get("producer")
        if isinstance(producer, dict):
            return _words(producer.get("name"), producer.get("version"))
    if not sections or sections[0].method is None:
        return None
    first = sections[0].content.data
    return _words(sections[0].method, first.get("autoround_version") or first.get("version"))


def _words(*values: object) -> str:
    """The strings among values that only inform, so that no type is worth an error."""
    return " ".join(value for value in values if isinstance(value, str))


def _kv_measured(sections: list[_Section]) -> str | None:
    for section in sections:
        if section.method == "quark":
            return "post_rope" if section.content.flag("kv_cache_post_rope") else "pre_rope"
    return None


def _quantizes_query(section: JsonObject) -> bool:
    layers = section.child("layer_quant_config")
    quark = [
        layer.child("output_tensors")
        for name, layer in (layers.children() if layers is not None else ())
        if name.endswith("q_proj")
    ]
    words = (section.text("static_attention_dtype"), section.text("fa_quant_type"))
    return any(statement is not None for statement in (*quark, *words, attention_group(section)))


def _quantizes_linear_outputs(section: JsonObject) -> bool:
    """Leaves out the groups by which old compressed-tensors quantized only K's and V's outputs."""
    groups = section.child("config_groups")
    for _, group in groups.children() if groups is not None else ():
        is_kv = all(target.endswith(("k_proj", "v_proj")) for target in group.texts("targets"))
        if group.child("output_activations") is not None and not is_kv:
            return True
    everywhere = section.child("global_quant_config")
    return everywhere is not None and everywhere.child("output_tensors") is not None


def _linear_activations(section: JsonObject) -> str | None:
    word = section.text("activation_scheme")
    if word is not None:
        return word
    groups = section.child("config_groups")
    for _, group in groups.children() if groups is not None else ():
        arguments = group.child("input_activations")
        if arguments is not None and group.child("weights") is not None:
            return "dynamic" if arguments.data.get("dynamic") else "static"
    everywhere = section.child("global_quant_config")
    inputs = None if everywhere is None else everywhere.child("input_tensors")
    return None if inputs is None else "dynamic" if inputs.flag("is_dynamic") else "static"


def _linear_ignored(sections: list[JsonObject]) -> tuple[str, ...]:
    lists = (section.texts(key) for section in sections for key in _IGNORE_LISTS)
    return next((patterns for patterns in lists if patterns), ())


def _scheme_problems(schemes: list[KvScheme]) -> Iterator[Problem]:
    if not schemes:
        return
    ruling = schemes[0]
    for fault in ruling.faults():
        message = (
            f"{ruling.source} declares {fault}; supported are static, symmetric fp8_e4m3 scales,"
            " one a tensor or a head: quantize the KV cache with such a scheme"
        )
        yield Problem("unsupported_scheme", None, ruling.file, message)
    for other in schemes[1:]:
        if other.dtype != ruling.dtype:
            message = (
                f"{ruling.source} declares {ruling.dtype}, but {other.source} declares"
                f" {other.dtype}; remove the file that is wrong"
            )
            yield Problem("conflict", None, other.file, message)


def _rotation_problems(sections: list[JsonObject]) -> Iterator[Problem]:
    for section in sections:
        transforms = section.child("transform_config")
        groups = None if transforms is None else transforms.child("config_groups")
        for name, transform in groups.children() if groups is not None else ():
            if _is_rotated(transform):
                message = (
                    f"{transform.file}: {transform.path} rotates Q and K (SpinQuant {name}), so K's"
                    " scales are those of a rotated K, which is not supported; quantize without it"
                )
                yield Problem("unsupported_scheme", None, transform.file, message)


def _is_rotated(transform: JsonObject) -> bool:
    applications = transform.data.get("apply")
    if applications is None:
        return False
    if not isinstance(applications, list) or not all(isinstance(it, dict) for it in applications):
        raise transform.error("apply", "a list of objects")
    places = (
        JsonObject(it, transform.file, f"{transform.place('apply')}.{number}")
        for number, it in enumerate(applications)
    )
    return any(place.text("location") in _ROTATED_LOCATIONS for place in places)
