"""The commands as users run them: what they print, and with which status they end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from quantattn.cli import app
from quantattn.models import generate, load_llama

CHECKPOINTS = Path(__file__).parent.parent / "data" / "checkpoints"
COMMANDS = ("inspect", "generate", "demo", "doctor", "audit")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(CHECKPOINTS / "ct-fp8-kv-tensor", tmp_path / "broken"))
    (folder / "model.safetensors").write_bytes(b"\x00\x01")
    return folder


def test_help_names_every_command() -> None:
    shown = run("--help")
    assert shown.exit_code == 0
    assert all(command in shown.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    shown = run(command, "--help")
    assert shown.exit_code == 0
    assert "Usage" in shown.stdout


@pytest.mark.parametrize("arguments", [(), ("explain",), ("inspect",), ("inspect", "a", "b")])
def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_wrong_usage_is_said_in_one_line_that_no_width_breaks() -> None:
    name = "no-such-option" * 10
    lines = run("inspect", "somewhere", f"--{name}").stderr.splitlines()
    assert lines[-1] == f"Error: No such option: --{name}"


def test_inspect_json_is_one_object_with_exact_values() -> None:
    name = "ct-fp8-kv-attn-head"
    shown = run("inspect", CHECKPOINTS / name, "--json")
    assert shown.exit_code == 0
    document = json.loads(shown.stdout)
    assert list(document) == ["declared", "layers", "problems"]
    assert document["problems"] == []
    stored = load_file(CHECKPOINTS / name / "model.safetensors")
    rows = {(row["layer"], row["role"]): row for row in document["layers"]}
    assert len(rows) == len(document["layers"]) == 8
    for (layer, role), row in rows.items():
        assert set(row) == {"layer", "role", "value", "source", "key", "file"}
        if role in "kv":
            key = f"{layer}.{role}_scale"
            assert (row["source"], row["key"]) == ("checkpoint", key)
            assert row["file"] == "model.safetensors"
            assert row["value"] == stored[key].double().flatten().tolist()
        else:
            assert (row["source"], row["value"], row["key"]) == ("default", 1.0, None)


def test_inspect_shows_every_scale_and_its_key() -> None:
    shown = run("inspect", CHECKPOINTS / "ct-fp8-kv-tensor")
    assert shown.exit_code == 0
    for layer in (0, 1):
        for role in "kv":
            key = f"model.layers.{layer}.self_attn.{role}_scale"
            assert sum(key in line for line in shown.stdout.splitlines()) == 1
    assert "kv_dtype: fp8_e4m3" in shown.stdout
    assert shown.stdout.endswith("no problems\n")


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_problems_are_status_1_and_named(flags: tuple[str, ...]) -> None:
    shown = run("inspect", CHECKPOINTS / "llmcompressor-llama-kvfp8asym", *flags)
    assert shown.exit_code == 1
    for layer in (0, 1):
        for role in "kv":
            assert f"model.layers.{layer}.self_attn.{role}_zero_point" in shown.stdout
    assert "asymmetric" in shown.stdout


def test_strict_refuses_absent_scales(tmp_path: Path) -> None:
    complete = CHECKPOINTS / "ct-kv-only-tensor"
    assert run("inspect", complete, "--strict").exit_code == 0
    lacking = Path(shutil.copytree(complete, tmp_path / "lacking"))
    shutil.copy(CHECKPOINTS / "base" / "model.safetensors", lacking)
    assert run("inspect", lacking).exit_code == 0
    shown = run("inspect", lacking, "--strict")
    assert shown.exit_code == 1
    assert "model.layers.1.self_attn" in shown.stdout


@pytest.mark.parametrize("command", [("inspect",), ("generate", "--prompt-ids", "1")])
def test_an_unreadable_checkpoint_is_status_2_and_one_message(
    command: tuple[str, ...], broken: Path, tmp_path: Path
) -> None:
    for path in (broken, tmp_path / "absent"):
        shown = run(*command, path)
        assert shown.exit_code == 2
        assert shown.stdout == ""
        assert shown.stderr.startswith("quantattn: ")
        assert path.name in shown.stderr or "model.safetensors" in shown.stderr
        assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_generate_prints_the_report_and_the_tokens(kv_cache_dtype: str) -> None:
    path = CHECKPOINTS / "ct-fp8-kv-tensor"
    arguments = ("--prompt-ids", "1,2,3", "--max-new-tokens", 4, "--kv-cache-dtype", kv_cache_dtype)
    shown = run("generate", path, *arguments)
    assert shown.exit_code == 0, shown.stderr
    model, report = load_llama(path, kv_cache_dtype=kv_cache_dtype)
    tokens = generate(model, [1, 2, 3], 4).token_ids
    assert str(report) in shown.stdout
    assert shown.stdout.splitlines()[-2:] == [
        "prompt: 1,2,3",
        f"tokens: {','.join(map(str, tokens))}",
    ]


def test_generate_takes_text_where_a_tokenizer_lies() -> None:
    pytest.importorskip("tokenizers")
    shown = run("generate", CHECKPOINTS / "base", "--prompt", "hello", "--max-new-tokens", 2)
    assert shown.exit_code == 0, shown.stderr
    labels = [line.partition(":")[0] for line in shown.stdout.splitlines()[-3:]]
    assert labels == ["prompt", "tokens", "text"]


def test_generate_says_that_no_tokenizer_is_there() -> None:
    shown = run("generate", CHECKPOINTS / "ct-fp8-kv-tensor", "--prompt", "hello")
    assert shown.exit_code == 2
    assert "tokenizer.json is not there" in shown.stderr


def test_generate_says_that_tokenizers_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    shown = run("generate", CHECKPOINTS / "base", "--prompt", "hello")
    assert shown.exit_code == 2
    assert "pip install tokenizers" in shown.stderr


def test_generate_names_a_damaged_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = Path(shutil.copytree(CHECKPOINTS / "base", tmp_path / "base"))
    (folder / "tokenizer.json").write_text("{")
    shown = run("generate", folder, "--prompt", "hello")
    assert shown.exit_code == 2
    assert "tokenizer.json: " in shown.stderr


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8_per_token_head", "int4_per_token_head"])
def test_generate_runs_every_cache_format(kv_cache_dtype: str) -> None:
    arguments = ("--prompt-ids", "1,2,3", "--max-new-tokens", "3")
    folder = CHECKPOINTS / "ct-fp8-kv-tensor"
    shown = run("generate", folder, *arguments, "--kv-cache-dtype", kv_cache_dtype)
    assert shown.exit_code == 0
    assert len(shown.stdout.splitlines()[-1].split(",")) == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--prompt-ids"),
        (("--prompt-ids", "1", "--prompt", "hello"), "--prompt-ids"),
        (("--prompt-ids", "one"), "'one'"),
        (("--prompt-ids", "1,,2"), "'1,,2'"),
        (("--prompt-ids", "1", "--max-new-tokens", "0"), "--max-new-tokens"),
        (("--prompt-ids", "1", "--max-new-tokens", "9" * 30), "--max-new-tokens"),
        (("--prompt-ids", "1,256"), "got 256"),
        (("--prompt-ids", "1", "--kv-cache-dtype", "fp7"), "'fp7'"),
        (("--prompt-ids", "1", "--device", "cuda:99"), "'cuda:99'"),
    ],
)
def test_generate_refuses_wrong_arguments(arguments: tuple[str, ...], named: str) -> None:
    shown = run("generate", CHECKPOINTS / "ct-fp8-kv-tensor", *arguments)
    assert shown.exit_code == 2
    assert named in shown.stderr
    assert shown.exception is None or isinstance(shown.exception, SystemExit)


def test_generate_refuses_another_family() -> None:
    shown = run("generate", CHECKPOINTS / "llmcompressor-gptoss-kvhead", "--prompt-ids", "1")
    assert shown.exit_code == 2
    assert "model_type: got 'gpt_oss'" in shown.stderr


def test_demo_shows_sources_tokens_and_the_difference() -> None:
    shown = run("demo")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.count("  checkpoint  ") == 4
    assert "model.layers.1.self_attn.v_scale" in shown.stdout
    percent = float(shown.stdout.rstrip().rpartition(" ")[2].removesuffix("%"))
    assert 0.1 < percent < 10


def test_the_demo_checkpoint_is_one_of_llm_compressor() -> None:
    from importlib.resources import files

    folder = files("quantattn") / "data" / "demo"
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    same = CHECKPOINTS / "ct-fp8-kv-tensor" / "model.safetensors"
    assert (folder / "model.safetensors").read_bytes() == same.read_bytes()


def test_inspect_says_that_nothing_is_declared() -> None:
    lines = run("inspect", CHECKPOINTS / "base").stdout.splitlines()
    assert lines[0] == "no quantized KV cache is declared"
    assert not any("null" in line or line.endswith(" ") for line in lines[:-1])


def test_doctor_names_a_kernel_for_every_operation_and_format() -> None:
    from quantattn.ops.support import support_table

    shown = run("doctor")
    assert shown.exit_code == 0
    assert f"torch: {torch.__version__}" in shown.stdout
    lines = [line.split() for line in shown.stdout.splitlines()]
    for row in support_table():
        if row.device == "cpu":
            assert (
                sum(
                    cells[:3] == [row.operation, row.kv_cache_dtype or "-", "cpu"]
                    for cells in lines
                )
                == 1
            )


def test_doctor_names_a_device_that_no_kernel_is_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ("H200", "Old")[index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((9, 0), (6, 1))[index])
    shown = run("doctor").stdout
    assert "cuda:0: H200, compute capability 9.0" in shown
    assert "triton static_quant_fp8 (native)" in shown
    assert "capability 6.1\n  no kernel is made for it, but for sm_75, sm_80" in shown
    assert "capability 9.0\n  no kernel" not in shown


@pytest.mark.parametrize(
    ("capability", "row"),
    [
        ((8, 0), "sm_80"),
        ((8, 7), "sm_86"),
        ((10, 3), "sm_100"),
        ((12, 1), "sm_120"),
        ((7, 5), "sm_75"),
        ((7, 0), None),
        ((11, 0), None),
    ],
)
def test_a_device_runs_the_kernels_of_the_last_architecture_before_it(capability, row) -> None:
    from quantattn.ops.support import device_row

    assert device_row(*capability) == row


MODELS = """
import torch
from quantattn import QuantAttention

def sound():
    return torch.nn.ModuleList([QuantAttention(4, 32, num_kv_heads=2)])

def old():
    model = sound()
    model.append(torch.nn.Module())
    model[1]._k_scale = torch.tensor(0.0123)
    model[1]._k_scale_float = 0.0123
    return model

def number():
    return 3

def failing():
    raise RuntimeError("no weights")

def leaving():
    raise SystemExit(3)

constant = 5
made = sound()
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that lies in the current folder only."""
    name = "models_to_audit"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    return name


def test_audit_finds_nothing_in_a_sound_model(models: str) -> None:
    shown = run("audit", f"{models}:sound")
    assert (shown.exit_code, shown.stdout) == (0, "nothing found\n")


def test_audit_names_each_finding(models: str) -> None:
    shown = run("audit", f"{models}:old")
    assert shown.exit_code == 1
    assert "1._k_scale: " in shown.stdout
    assert "1._k_scale_float: " in shown.stdout
    assert shown.stdout.endswith("2 finding(s)\n")


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("{}", "module.path:factory"),
        ("{}:", "module.path:factory"),
        (":sound", "module.path:factory"),
        ("{}:absent", "absent"),
        ("{}:constant", "constant"),
        ("{}:number", "made int"),
        ("{}:failing", "no weights"),
        ("{}:leaving", "SystemExit: 3"),
        ("{}:made", "no function by the name made"),
        ("no_such_module:sound", "no_such_module"),
    ],
)
def test_audit_refuses_a_bad_target(models: str, target: str, named: str) -> None:
    shown = run("audit", target.format(models))
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert named in shown.stderr
