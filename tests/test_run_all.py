"""run_all.sh: the five methods and their comparison, and what it does when a part is missing."""

import os
import re
import sys

from conftest import METHODS, ROOT, launch, load

TINY = ["--epochs", 1, "--max-steps", 1, "--workers", 0]


def rows(text):
    """Returns the table's lines, split into cells."""
    table = text[text.index("\nmethod ") + 1 :].split("\n\n")[0]
    return [re.split(r"  +", line.strip()) for line in table.splitlines()]


def test_five_methods_and_their_comparison(tmp_path):
    result = launch("bash", ROOT / "run_all.sh", *TINY, cwd="/", RUNS=tmp_path)
    assert result.returncode == 0, result.output
    assert "Installing" not in result.output and "Building" not in result.output  # nothing to set up: we run already
    _, *table = rows(result.output)
    assert [row[1] for row in table] == ["1", "2", "2", "2", "2"]
    assert float(table[1][-1]) == 0  # 02 against itself
    for row, method in zip(table, METHODS, strict=True):
        history = load(tmp_path / method)["history"]
        assert row[2] == f"{history[0]['images_per_second']:,.0f}" and row[4] == f"{history[0]['top1']:.2f}"
        assert float(row[-1]) < (1e-2 if method == "04_apex" else 1e-6)
    document = (tmp_path / "comparison.md").read_text()
    assert all(row[0] in document for row in table) and "comparison.png" in document
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_without_horovod_the_other_four_run(checkout, tmp_path):
    """Where Horovod has to be rebuilt, being for another PyTorch, and cannot be: CMake and the like are missing.

    The horovod on PYTHONPATH is a stand-in with nothing but a name and a PyTorch that it was built for.
    """
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
    result = launch("bash", checkout / "run_all.sh", *TINY, RUNS=tmp_path, timeout=200, **env)
    assert result.returncode == 1, result.output
    _, *table = rows(result.output)
    assert [row[1] for row in table] == ["1", "2", "2", "2", "-"]
    assert re.match(r"no Horovod: .*apt-get install (g\+\+|cmake|make)", table[4][-1])
    assert "no Horovod" in (tmp_path / "comparison.md").read_text()
