"""The GPU benchmark where there is no GPU: its arithmetic, what it refuses, and the whole script at toy size."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "bench"))

import bench_gpu  # noqa: E402  (a script, not a package)
import gpu_attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_in_haste")


def test_the_whole_script_at_toy_size(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main(["--tiny", "--allow-cpu", "--out", str(tmp_path / "r.json")]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads((tmp_path / "r.json").read_text())
    assert (last["name"], last["value"], last["pass"], last["goal"]) == ("bench_gpu", None, False, ">= 0.4")
    own = last["details"]["attention"]["library"]
    assert own["median_step_s"] > 0
    assert own["error_against_einsum"] < gpu_attention.TOLERANCE
    assert len(own["losses"]) == 2
    assert last["details"]["peak_tflops"] is None


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main([]) == 2
    assert "launch/bench_gpu.sh" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_gpu.main(["--allow-cpu"])
    assert "--allow-cpu needs --tiny" in capsys.readouterr().err


def test_the_launcher_stops_before_it_installs_anything(tmp_path: pathlib.Path) -> None:
    """With a stand-in for nvidia-smi that finds no card; nothing is made."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CRL_VENV": str(tmp_path / "venv")}
    command = ["bash", str(ROOT / "launch" / "bench_gpu.sh"), "--steps", "3"]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no NVIDIA GPU here" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_with_a_card_the_launcher_adds_cuda_of_the_same_version_and_passes_its_arguments_on(tmp_path: pathlib.Path) -> None:
    """With stand-ins for nvidia-smi, the set-up, Python and uv that write down how they were called."""
    copy = tmp_path / "a clone"
    (copy / "launch").mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "bench_gpu.sh", copy / "launch")
    log = f'echo "${{0##*/}} $* ${{XLA_PYTHON_CLIENT_MEM_FRACTION:-}} ${{JAX_PLATFORMS:-}}" >> "{tmp_path}/calls"\n'
    files = {
        copy / "launch" / "setup.sh": log,
        tmp_path / "bin" / "nvidia-smi": "exit 0\n",
        tmp_path / "venv" / "bin" / "python": f"if [[ $1 == -c ]]; then echo 1.2.3; else {log}fi\n",
        tmp_path / "venv" / "bin" / "uv": log,
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/bash\n" + text)
        path.chmod(0o755)
    path, venv = f"{tmp_path / 'bin'}:{os.environ['PATH']}", str(tmp_path / "venv")
    kept = {name: value for name, value in os.environ.items() if name != "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    environment = kept | {"PATH": path, "CRL_VENV": venv, "JAX_PLATFORMS": "cpu"}
    command = ["bash", str(copy / "launch" / "bench_gpu.sh")]
    subprocess.run([*command, "--out", "r.json"], cwd="/", env=environment, check=True, timeout=60)
    subprocess.run([*command, "--tiny", "--allow-cpu"], cwd="/", env=environment, check=True, timeout=60)
    assert [line.split() for line in (tmp_path / "calls").read_text().splitlines()] == [
        ["setup.sh", "cpu"],
        ["uv", "pip", "install", "--quiet", "--python", f"{venv}/bin/python", "jax[cuda12]==1.2.3", "cpu"],
        ["python", "tests/bench/bench_gpu.py", "--out", "r.json", "0.93"],
        ["setup.sh", "cpu"],
        ["python", "tests/bench/bench_gpu.py", "--tiny", "--allow-cpu", "cpu"],
    ]


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
    ],
)
def test_peaks_by_device_kind(kind: str, peak: float) -> None:
    assert bench_gpu.peak_tflops(kind) == peak


@pytest.mark.parametrize("kind", ["NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100"])
def test_an_unknown_card_or_a_slice_of_one_is_refused_with_the_way_out(kind: str) -> None:
    with pytest.raises(ValueError, match="pass --peak-tflops"):
        bench_gpu.peak_tflops(kind)


def test_the_needed_arithmetic_by_hand() -> None:
    """1.5 B parameters, of which the embedding is the head; 16 rows of 4 sequences of 1024 tokens."""
    w = bench_gpu.Workload(bench_gpu.QWEN2_5_1_5B, 16, 8, sequences=4, prompt=128, trained=896)
    assert bench_gpu.transformer.count_params(w.config) == 1_543_714_304
    layers, head = 28 * (1536 * (12 + 2 + 2 + 12) * 128 + 3 * 1536 * 8960), 1536 * 151_936
    pairs = 64 * 1024 * 1025 / 2
    attention = 12 * 28 * 12 * 128 * pairs
    assert (w.length, w.tokens) == (4096, 65_536)
    assert w.needed_flops() == 6 * layers * 65_536 + 6 * head * 64 * 896 + attention
    assert w.usual_flops() == 6 * 1_543_714_304 * 65_536 + attention
    alive = 4 * 151_936 * 8 * w.chunk(2 * 2**30)  # bytes of logits of one micro-batch of 2 rows of 4 sequences
    assert 2**30 < alive <= 2 * 2**30


def test_the_packed_layout_by_hand() -> None:
    segments = np.array([[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0]])
    lengths, starts = gpu_attention.layout(segments)
    assert np.asarray(lengths)[:, :3].tolist() == [[3, 2, -1], [6, -1, -1]]
    assert np.asarray(starts)[:, :3].tolist() == [[0, 3, -1], [0, -1, -1]]
    assert starts.shape == (2, gpu_attention.MOST_SEGMENTS + 1)


@pytest.mark.parametrize(("name", "bias"), [("library", True), ("causal", True), ("segments", False)])
def test_every_way_to_attend_lowers_for_cuda(name: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward pass up to XLA's input, which needs no card. A mask is a bias of rows x 1 x queries x keys, with a gradient."""
    cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo", reason="jax moved its private cuDNN module")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 92_800)  # what it would find on a Hopper card
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)
    attend, _ = gpu_attention.variants("gpu")[name]
    q, k = (jax.ShapeDtypeStruct((2, 64, heads, 128), jax.numpy.bfloat16) for heads in (6, 2))
    segments = np.repeat([[0, 1, 2, -1]] * 2, 16, axis=1)
    mask = gpu_attention.visible(np.tile(np.arange(16), (2, 4)), segments, None)

    def loss(q, k, v):
        return attend(q, k, v, gpu_attention.Scope(mask, segments, None)).astype(np.float32).sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
    assert ("fmhaScaleBiasSoftmaxBackward" if bias else "fmhaSoftmaxBackward") in text
    assert ("2x1x64x64xbf16" in text) == bias


def test_a_wrong_kernel_is_found() -> None:
    def leaky(q, k, v, scope):
        return gpu_attention.einsum_attention(q, k, v, scope._replace(mask=jax.numpy.ones_like(scope.mask)))

    with pytest.raises(ValueError, match="this attention is wrong"):
        gpu_attention.agreement(leaky, bench_gpu.TINY)
