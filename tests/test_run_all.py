"""run_all.sh: the five methods with their default settings and the comparison, and what it does without Horovod."""

import os
import re
import sys

import pytest
from conftest import HAS_APEX, METHODS, ROOT, launch, load, train


def rows(text):
    """Returns the table's lines, split into cells."""
    table = text[text.index("\nmethod ") + 1 :].split("\n\n")[0]
    return [re.split(r"  +", line.strip()) for line in table.splitlines()]


@pytest.fixture(scope="module")
def all_five(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    return runs, launch("bash", ROOT / "run_all.sh", "--workers", 0, cwd="/", RUNS=runs, timeout=240)


@pytest.mark.full
def test_five_methods_and_their_comparison(all_five, tmp_path):
    """In float32 and with the default recipe, the methods end within 1e-3 of each other and equally accurate."""
    runs, result = all_five
    assert result.returncode == 0, result.output
    assert "Installing" not in result.output and "Building" not in result.output  # nothing to set up: we run already
    _, *table = rows(result.output)
    assert [row[1] for row in table] == ["1", "2", "2", "2", "2"]
    assert float(table[1][-1]) == 0  # 02 against itself
    for row, method in zip(table, METHODS, strict=True):
        checkpoint = load(runs / method)
        assert row[4] == f"{checkpoint['history'][-1]['top1']:.2f}" and float(row[4]) > 97
        if not checkpoint["command"][0].endswith("native.py"):  # which by default computes in bfloat16
            assert float(row[-1]) < 1e-3
            assert float(row[4]) == pytest.approx(float(table[1][4]), abs=0.1)
    document = (runs / "comparison.md").read_text()
    assert all(row[0] in document for row in table) and "comparison.png" in document
    assert (runs / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.skipif(HAS_APEX, reason="04_apex/run.sh runs main.py")
def test_native_without_amp_agrees_too(all_five, tmp_path):
    train("04_apex", "--workers", 0, "--no-amp", "--output", tmp_path)
    one, other = load(tmp_path), load(all_five[0] / "02_distributed")
    assert max((one["model"][name] - other["model"][name]).abs().max() for name in one["model"]) < 1e-3
    assert one["history"][-1]["top1"] == pytest.approx(other["history"][-1]["top1"], abs=0.1)


@pytest.mark.full
def test_without_horovod_the_other_four_run(all_five, checkout, tmp_path):
    """Where Horovod has to be rebuilt, being for another PyTorch, and cannot be: CMake and the like are missing.

    The horovod on PYTHONPATH is a stand-in with nothing but a name and a PyTorch that it was built for; the four run.sh
    are stand-ins that hand out the results of the test above.
    """
    for method in METHODS[:4]:
        (checkout / method / "run.sh").write_text(
            f'output="${{@: -1}}"; mkdir -p "$output"; cp "{all_five[0] / method}"/* "$output"'
        )
    stand_in = tmp_path / "stand in"
    (stand_in / "horovod-0.28.1.dist-info").mkdir(parents=True)
    (stand_in / "horovod-0.28.1.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
    (stand_in / "horovod").mkdir()
    (stand_in / "horovod" / "__init__.py").touch()
    (stand_in / "horovod" / "built-for").write_text("torch 1.0")
    programs = tmp_path / "programs"  # a PATH with everything but what builds things
    programs.mkdir()
    for folder in (*os.environ["PATH"].split(":"), "/usr/bin", "/bin"):
        for program in os.listdir(folder) if os.path.isdir(folder) else []:
            if program not in ("g++", "cmake", "make") and not (programs / program).is_symlink():
                (programs / program).symlink_to(os.path.join(folder, program))
    env = {"PYTHONPATH": stand_in, "PATH": f"{os.path.dirname(sys.executable)}:{programs}"}
    result = launch("bash", checkout / "run_all.sh", RUNS=tmp_path, **env)
    assert result.returncode == 1, result.output
    _, *table = rows(result.output)
    assert [row[1] for row in table] == ["1", "2", "2", "2", "-"]
    assert re.match(r"no Horovod: .*apt-get install (g\+\+|cmake|make)", table[4][-1])
    assert "no Horovod" in (tmp_path / "comparison.md").read_text()
