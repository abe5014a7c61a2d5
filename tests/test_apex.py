"""04_apex with no apex, with PyPI's, with a stand-in that records the calls, and with a real one where there is one."""

from pathlib import Path

import pytest
import torch
from conftest import HAS_APEX, ROOT, launch, load, train

STAND_INS = ROOT / "tests" / "stand_ins"
TINY = ["--arch", "resnet18", "--image-size", 32, "--batch-size", 8, "--workers", 0, "--max-steps", 2]


def lines(text):
    return [line for line in text.splitlines() if line]


@pytest.mark.skipif(HAS_APEX, reason="an apex is installed")
def test_without_apex_main_says_which_one():
    result = launch("python3", ROOT / "04_apex" / "main.py")
    assert result.returncode == 2
    (line,) = lines(result.output)
    assert "needs NVIDIA's Apex at tag 25.05" in line and "No module named 'apex'" in line and "native.py" in line


@pytest.mark.full
def test_pypis_apex_is_named():
    """By main.py as an error, by run.sh as the reason why native.py runs."""
    env = {"PYTHONPATH": STAND_INS / "pypi"}
    result = launch("python3", ROOT / "04_apex" / "main.py", **env)
    assert result.returncode == 2
    (line,) = lines(result.output)
    assert "not PyPI's apex" in line and "No module named 'pyramid_mailer'" in line
    result = train("04_apex", "--help", nproc=1, **env)
    assert "cannot be used (No module named 'pyramid_mailer'): running native.py" in result.output
    assert "--no-amp" in result.output  # native.py's


def test_order_of_the_calls(images, tmp_path):
    """Optimizer before initialize, initialize before DDP, backward inside scale_loss, amp's state in the checkpoint."""
    calls = tmp_path / "calls"
    env = {"PYTHONPATH": STAND_INS / "recording", "APEX_CALLS": calls}
    options = ["--data", images, *TINY, "--opt-level", "O1", "--output", tmp_path]
    train("04_apex", *options, "--epochs", 1, nproc=1, **env)
    step = ["scale_loss", "backward", "unscale"]
    assert calls.read_text().splitlines() == ["optimizer", "initialize O1 True", "DDP", *step, *step]
    assert load(tmp_path)["amp"] == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 7}}


@pytest.mark.skipif(not HAS_APEX, reason="no apex is installed")
def test_real_apex(images, tmp_path):
    pytest.importorskip("apex.amp", exc_type=ImportError)
    result = train("04_apex", "--data", images, *TINY, "--epochs", 1, "--output", tmp_path)  # without a GPU: amp is off
    assert "apex.amp off" in result.output and load(tmp_path)["command"][0].endswith("main.py")


@pytest.mark.full
@pytest.mark.skipif(HAS_APEX, reason="04_apex/run.sh runs main.py")
def test_native_computes_in_16_bits(tmp_path):
    """Nearly the same weights: not the same, or --amp would do nothing. It is on where the machine is fast at it."""
    weights = []
    for option in ("--amp", "--no-amp"):
        train("04_apex", "--epochs", 1, "--max-steps", 3, "--workers", 0, option, "--output", tmp_path / option)
        weights.append(load(tmp_path / option)["model"]["0.weight"])
    assert 0 < (weights[0] - weights[1]).abs().max() < 1e-2
    fast = torch.cuda.is_available() or "bf16" in Path("/proc/cpuinfo").read_text()
    result = train("04_apex", "--evaluate", "--resume", tmp_path / "--amp" / "last.pt")
    assert f"torch.amp {'on' if fast else 'off'}, " in result.output
